"""A small grammar of everyday English, with numbers."""

import random
import re

SUBJECTS = (
    "i,you,we,they,he,she,the teacher,my sister,our neighbour,the manager,a young woman,the children,my father,"
    "the driver,the students,his friend,the engineer,the company,your mother,the police officer,a small boy,the nurse,"
    "the visitors,her uncle,the customer,the team,my brother,the doctor,the old man,our family,everybody,nobody,"
    "the girl next door,my best friend,the people here,a tall man,the baby,the dog,the government,the waiter"
).split(",")
VERBS = (
    "bought,found,saw,sent,opened,closed,painted,cleaned,forgot,wanted,brought,lost,described,finished,started,"
    "repaired,ordered,moved,wrote about,talked about,looked at,waited for,listened to,thought about,asked for,"
    "paid for,carried,watched,changed,checked,needed,liked,remembered,showed me,took,used,kept,made,sold,shared,"
    "could not find,will never forget,would like to see,has already seen,is looking for,was reading about,"
    "did not understand,wants to buy,cannot afford,used to have,should have seen,must not touch"
).split(",")
OBJECTS = (
    "the new car,a cup of tea,the old house,a letter,some fresh bread,the kitchen window,a large box,the red bicycle,"
    "two tickets,the green door,an interesting book,the computer,a phone call,the garden,some music,the big table,"
    "the news,a glass of water,the blue jacket,a short message,the camera,three apples,the answer,a warm coat,"
    "the dinner,the project,a picture of the sea,the last bus,the question,a cheap hotel,the office,the keys,"
    "the football game,cold milk,chicken soup,coffee and sugar,cheese and vegetables,the report,the meeting,the bill,"
    "a beautiful song,the weather,her birthday,the first train,this voice,the software,a better job,my passport,"
    "the whole story,your help,an umbrella,the lights,the television,breakfast,lunch,a long walk,the map,the river,"
    "a strange noise,the moon and the stars,the map of the city,a piece of paper,the telephone number"
).split(",")
PLACES = (
    "in the park,at the station,near the river,in the city,at home,on the beach,in the hospital,behind the school,"
    "at the airport,in front of the church,on the mountain,in the restaurant,across the street,next to the bank,"
    "in the library,at work,in london,in the kitchen,on the train,in the north of the country,upstairs,outside,"
    "in the classroom,on the table,under the bridge,around the corner,down the street,in the room,by the door,"
    "in new york,in the south,at the market,in the village,over there,here,at the end of the road"
).split(",")
TIMES = (
    "yesterday,this morning,last week,on monday,on tuesday afternoon,every wednesday,on thursday evening,last friday,"
    "on saturday,next sunday,in january,in february,in march,in april,in may,in june,in july,in august,in september,"
    "in october,in november,in december,at three o'clock,before lunch,after dinner,at half past seven,two years ago,"
    "all day,tonight,at noon,for ten minutes,right now,earlier today,at a quarter to nine,today,tomorrow,every day,"
    "at midnight,in the evening,before four o'clock,at five thirty,in a few minutes,last night,once again,"
    "for the first time,next month,later,during the night,at six in the morning,on the twenty first of june"
).split(",")
ADJECTIVES = (
    "nice,cold,warm,sunny,terrible,beautiful,expensive,cheap,difficult,easy,important,strange,funny,quiet,loud,heavy,"
    "light,clean,dirty,friendly,angry,tired,hungry,happy,sad,ready,busy,late,early,free,wonderful,different,possible,"
    "dark,bright,strong,weak,young,old,new,short,long,slow,fast,sick,healthy,rich,poor,safe,dangerous,ill,right,wrong"
).split(",")
REQUESTS = (
    "could you please,can you,would you,please,do not,you should,we have to,i would like to,how can i,why did you,"
    "let us,remember to,try to,i am going to,did they,we might,you do not need to,would it be possible to,let me"
).split(",")
ACTIONS = (
    "tell me about,help me with,give me,show me,send me,bring,look for,remember,explain,turn off,turn on,wait for,"
    "think of,buy,call me about,write down,read,speak about,talk about,listen to,play,open,close,clean,pay for"
).split(",")
QUESTIONS = (
    "where is,what is,how much is,who has,when can we see,why do they need,is this,what happened to,"
    "how many people saw,have you seen,which of you wants,whose is,"
    "how long will it take to reach,what do you think of,are you sure about"
).split(",")
OPENINGS = (
    "hello,good morning,good evening,good afternoon,thank you,thank you very much,welcome,excuse me,well,yes,no,"
    "of course,sorry,good night,hi,okay,all right,great,please,oh,thanks,i am sorry,nice to meet you,goodbye"
).split(",")
STATEMENTS = (
    "my name is,this is,i am,we are from,it is,that was,here is,there is,that sounds like,it looks like"
).split(",")
JOINTS = "and,but,because,so,when,while,although,before,after,if,until,as soon as".split(",")


KINDS = {
    "clause": ("{subject} {verb} {object}",),
    "subject": SUBJECTS, "verb": VERBS, "object": OBJECTS, "place": PLACES, "time": TIMES, "adjective": ADJECTIVES,
    "request": REQUESTS, "action": ACTIONS, "question": QUESTIONS, "opening": OPENINGS, "statement": STATEMENTS,
    "joint": JOINTS,
}  # fmt: skip
# By weight; "{word}" is a frequent word, "{number}" is in digits.
PATTERNS = {
    "{clause} {place} {time}": 25,
    "{time}, {clause}": 10,
    "{clause} {joint} {clause}": 10,
    "the {word} is very {adjective} {time} and {clause}": 8,
    "{request} {action} {object}": 4,
    "{request} {action} {object} {time}": 4,
    "{request} {action} {object}?": 4,
    "{question} {object} {place}?": 10,
    "{subject} {verb} {number} {word} {time}": 8,
    "{opening}, {statement} {word} {word}": 7,
    "it was {adjective} and {adjective} but {clause} {place}": 8,
    "{opening}": 5 / 3,
    "{opening}, {clause}": 5 / 3,
    "{clause}": 5 / 3,
}


def everyday_sentence(rng: random.Random, words: list[str]) -> str:
    """One sentence in lower case, numbers in digits. words: frequent words, for places where any word is possible."""

    def filled(pattern: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: of_kind(found[1]), pattern)

    def of_kind(kind: str) -> str:
        if kind == "number":
            return str(rng.choice((rng.randint(0, rng.choice((20, 100, 999, 9999))), rng.randint(1900, 2030))))
        return rng.choice(words) if kind == "word" else filled(rng.choice(KINDS[kind]))

    sentence = filled(*rng.choices([*PATTERNS], [*PATTERNS.values()]))
    return sentence if sentence.endswith("?") else sentence + rng.choice("....!")

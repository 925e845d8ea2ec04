"""A small grammar of everyday English: statements, questions, exclamations, short answers, names and numbers."""

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
    "please,do not,you should,we have to,i would like to,let us,remember to,try to,i am going to,we might,"
    "you do not need to,let me,please do not,do not forget to"
).split(",")
FAVOURS = (
    "could you please,can you,would you,how can i,why did you,did they,would it be possible to,do you want to,may i,"
    "shall we,would you mind if we,could somebody,why not"
).split(",")
ACTIONS = (
    "tell me about,help me with,give me,show me,send me,bring,look for,remember,explain,turn off,turn on,wait for,"
    "think of,buy,call me about,write down,read,speak about,talk about,listen to,play,open,close,clean,pay for"
).split(",")
QUESTIONS = (
    "where is,what is,how much is,who has,when can we see,why do they need,is this,what happened to,"
    "how many people saw,have you seen,which of you wants,whose is,do you like,did you bring,are you looking for,"
    "how long will it take to reach,what do you think of,are you sure about,does anybody remember,who paid for,"
    "can i borrow,is there anything wrong with,have we got,would you like,was that,do we need,shall we look for"
).split(",")
OPENINGS = (
    "hello,good morning,good evening,good afternoon,thank you,thank you very much,welcome,excuse me,well,yes,no,"
    "of course,sorry,good night,hi,okay,all right,great,please,oh,thanks,i am sorry,nice to meet you,goodbye"
).split(",")
ANSWERS = (
    "yes,no,maybe,not yet,not really,i think so,i hope so,i do not know,never mind,no problem,you are welcome,sure,"
    "certainly,absolutely,exactly,that is right,that is true,not at all,why not,me too,of course not,here you are,"
    "just a moment,one moment please,see you later,see you soon,see you tomorrow,take care,good luck,well done,"
    "no idea,fine,perfect,wonderful,i see,i agree,i understand,it depends,very well,as you like,after you,that is all"
).split(",")
SMALL_QUESTIONS = (
    "how are you,what is your name,where are you from,are you ready,is that so,really,what do you mean,who is there,"
    "what time is it,can you hear me,may i come in,is everything all right,how was your day,what is the matter,"
    "how old are you,do you speak english,where are we,what happened,are you sure,shall we go,anything else,who is it"
).split(",")
EXCLAMATIONS = (
    "what a {adjective} day,how {adjective},what a surprise,be careful,look at {object},come here,hurry up,stop it,"
    "that is {adjective},i am so {adjective},what a pity,do not touch {object},happy birthday,watch your step,"
    "have a {adjective} weekend,enjoy your meal,this is so {adjective},leave it {place},come in,have a nice trip"
).split(",")
NAMES = (
    "anna,peter,mary,john,lucy,tom,emma,david,sarah,michael,laura,daniel,julia,robert,helen,george,alice,william,"
    "martin,olivia,henry,nora,simon,grace,oliver,maria,thomas,james,susan,mister brown,missus smith,doctor wilson,"
    "miss taylor,mister jones,professor clark,missus miller,mister davis,kate,jack,paul,linda,steven,ruth,victor"
).split(",")
TOWNS = (
    "london,paris,boston,berlin,madrid,chicago,dublin,oxford,rome,vienna,texas,canada,spain,china,japan,india,brazil,"
    "germany,italy,france,new york,scotland,california,australia,amsterdam,moscow,egypt,mexico,sweden,portugal"
).split(",")
THINGS = (
    "bread,butter,milk,eggs,rice,fish,salad,tea,sugar,salt,lemons,oranges,potatoes,tomatoes,onions,soap,paper,pens,"
    "books,shoes,socks,gloves,a hat,two shirts,flowers,candles,a knife,some rope,honey,juice,nuts,pepper,grapes,carrots"
).split(",")
STATEMENTS = (
    "my name is,this is,i am,we are from,it is,that was,here is,there is,that sounds like,it looks like"
).split(",")
JOINTS = "and,but,because,so,when,while,although,before,after,if,until,as soon as".split(",")


KINDS = {
    "clause": ("{subject} {verb} {object}",),
    "subject": SUBJECTS, "verb": VERBS, "object": OBJECTS, "place": PLACES, "time": TIMES, "adjective": ADJECTIVES,
    "request": REQUESTS, "favour": FAVOURS, "action": ACTIONS, "question": QUESTIONS, "opening": OPENINGS,
    "statement": STATEMENTS, "joint": JOINTS, "answer": ANSWERS, "small": SMALL_QUESTIONS, "cry": EXCLAMATIONS,
    "name": NAMES, "town": TOWNS, "thing": THINGS,
}  # fmt: skip
# By weight; "{word}" is a frequent word, "{number}" is in digits.
PATTERNS = {
    "{clause} {place} {time}": 14,
    "{time}, {clause}": 6,
    "{clause} {joint} {clause}": 6,
    "{time}, {clause} {place}, {joint} {clause} {time}": 5,
    "if {clause}, {clause} {place}": 3,
    "the {word} is very {adjective} {time} and {clause}": 5,
    "{request} {action} {object}": 3,
    "{request} {action} {object} {time}": 3,
    "{favour} {action} {object}?": 4,
    "{favour} {action} {object} {time}?": 2,
    "{question} {object}?": 5,
    "{question} {object} {place}?": 6,
    "{name}, {question} {object}?": 3,
    "{question} {object}, {name}?": 2,
    "{small}?": 2,
    "{small}, {name}?": 2,
    "{opening}, {small}?": 2,
    "{subject} {verb} {object}, {answer}?": 1,
    "{cry}!": 3,
    "{name}, {cry}!": 2,
    "{subject} {verb} {number} {word} {time}": 6,
    "we need {thing}, {thing}, {thing} and {thing}": 2,
    "i would like {thing}, {thing} and {object}, please": 1,
    "{opening}, {statement} {word} {word}": 3,
    "{opening}, my name is {name} and i am from {town}": 2,
    "{name} and {name} {verb} {object} {time}": 4,
    "{name} said that {clause} {place}": 3,
    "the train from {town} to {town} leaves at {hour}": 2,
    "it was {adjective} and {adjective} but {clause} {place}": 5,
    "{answer}, {clause}": 3,
    "{answer}, {name}": 1.5,
    "{answer}": 1.5,
    "{opening}, {name}": 1.5,
    "{opening}": 1,
    "{opening}, {clause}": 2,
    "{clause}": 2,
}


def everyday_sentence(rng: random.Random, words: list[str]) -> str:
    """One sentence in lower case, numbers in digits. words: frequent words, for places where any word is possible."""

    def filled(pattern: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: of_kind(found[1]), pattern)

    def of_kind(kind: str) -> str:
        if kind == "number":
            return str(rng.choice((rng.randint(0, rng.choice((20, 100, 999, 9999))), rng.randint(1900, 2030))))
        if kind == "hour":
            return rng.choice(("a quarter past {0}", "half past {0}", "{0} o'clock", "{0} thirty", "{0}")).format(
                rng.randint(1, 12)
            )
        return rng.choice(words) if kind == "word" else filled(rng.choice(KINDS[kind]))

    sentence = filled(*rng.choices([*PATTERNS], [*PATTERNS.values()]))
    return sentence if sentence[-1] in "?!" else sentence + rng.choice("........!")

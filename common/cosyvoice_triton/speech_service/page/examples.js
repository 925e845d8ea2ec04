// Texts to begin with, by language. `voice`: what the play button of a voice speaks.

export const EXAMPLES = {
  en: {
    voice: "Hello. This is how I sound.",
    Greeting: "Hello, and welcome. It is good to have you here.",
    News: "The night train to Vienna is back. From June on, it leaves at 9:30 pm, and tickets start at $29.90.",
    Pause: "Take a deep breath. [pause 1s] And now, slowly, let it go.",
    SSML: '<speak>Your code is <say-as interpret-as="characters">B7K</say-as>.<break time="600ms"/>'
      + "<s>Please keep it.</s></speak>",
  },
  zh: {
    voice: "你好，这就是我的声音。",
    问候: "你好，欢迎光临，很高兴认识你。",
    新闻: "从6月1日起，开往上海的夜间列车每晚9:30发车，票价128元起。",
    停顿: "深呼吸。[pause 1s]现在，慢慢地呼出来。",
    SSML: '<speak>您的验证码是<say-as interpret-as="digits">2580</say-as>。<break time="600ms"/><s>请妥善保管。</s></speak>',
  },
  ja: {
    voice: "こんにちは。これがわたしのこえです。",
    あいさつ: "こんにちは。ようこそいらっしゃいました。",
    ポーズ: "おおきくいきをすって。[pause 1s]ゆっくりはいてください。",
  },
  ko: {
    voice: "안녕하세요. 제 목소리는 이렇습니다.",
    인사: "안녕하세요. 만나서 반갑습니다. 오늘도 좋은 하루 보내세요.",
    쉼: "숨을 깊이 들이마시고, [pause 1s] 천천히 내쉬세요.",
  },
  de: {
    voice: "Hallo. So klinge ich.",
    Begrüßung: "Guten Tag und herzlich willkommen. Schön, dass Sie da sind.",
    Pause: "Tief einatmen. [pause 1s] Und langsam wieder ausatmen.",
  },
  fr: {
    voice: "Bonjour. Voici ma voix.",
    Accueil: "Bonjour et bienvenue. C'est un plaisir de vous recevoir.",
    Pause: "Inspirez profondément. [pause 1s] Et maintenant, expirez doucement.",
  },
  es: {
    voice: "Hola. Así suena mi voz.",
    Saludo: "Hola y bienvenidos. Es un placer tenerles aquí.",
    Pausa: "Respira hondo. [pause 1s] Y ahora, suelta el aire despacio.",
  },
  it: {
    voice: "Ciao. Questa è la mia voce.",
    Saluto: "Buongiorno e benvenuti. È un piacere avervi qui.",
    Pausa: "Inspira profondamente. [pause 1s] E ora espira lentamente.",
  },
  ru: {
    voice: "Здравствуйте. Так звучит мой голос.",
    Приветствие: "Здравствуйте и добро пожаловать. Очень рады вас видеть.",
    Пауза: "Сделайте глубокий вдох. [pause 1s] А теперь медленно выдохните.",
  },
};

// What a button says -> the text before and after what is selected. SSML gets <speak> around all of the text.
export const MARKS = {
  "Pause of 1 s": ["[pause 1s]", ""],
  "SSML: pause": ['<break time="500ms"/>', ""],
  "SSML: letter by letter": ['<say-as interpret-as="characters">', "</say-as>"],
  "SSML: spoken as": ['<sub alias="">', "</sub>"],
  "Another voice": ["[voice:NAME] ", ""],
};

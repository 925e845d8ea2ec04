// The page: what is shown, and what the controls do.

import { Refused, Unreachable, call as callWith, dataUrlOf, formOf } from "/static/api.js";
import { codeOf } from "/static/code.js";
import { EXAMPLES, MARKS } from "/static/examples.js";
import { History } from "/static/history.js";
import { setUpKept, showRights } from "/static/kept_voices.js";
import { LiveSpeech } from "/static/live.js";
import { ownVoice, setUp } from "/static/own_voice.js";
import { draw } from "/static/player.js";
import { Answer, speak } from "/static/speak.js";
import { Spoken } from "/static/spoken.js";
import { Voices } from "/static/voices.js";

const $ = (id) => document.getElementById(id);
const OWN = "\u0000own"; // not a valid name of a voice
const RETRY_SECONDS = 2;
const WATCH_SECONDS = 10;
const TYPING_MS = 500; // without a key pressed, before the preview follows
const SETTINGS = ["language", "instructions", "speed", "pronunciation"]; // ids and fields of a request
const SEEDS = 2 ** 31;

let request = null; // AbortController of the live request
let shown = null; // the Answer that is played, or was last
let registered = []; // voices, as the service lists them
let limit = Infinity; // of characters
let retry = null; // timer, while the service is away
let typing = null; // timer of the preview

const spoken = new Spoken($("spoken"));
const voices = new Voices($("voices"), $("find"), (name) => {
  start(requested(EXAMPLES[exampleLanguage()].voice, name));
});
const past = new History($("history"), replay, reuse);
setUp(call, () => { voices.chosen = OWN; }, showVoices);
setUpKept(call, () => voices.chosen, showVoices);

async function call(path, options) {
  try {
    return await callWith(path, $("key").value.trim(), options);
  } catch (error) {
    if (error.status === 401) $("access").open = true;
    throw error;
  }
}

// --- the service ---------------------------------------------------------------------------------------------------

/** Lists the voices, and selects one of them if `name` says so. */
async function showVoices(name = voices.chosen) {
  const listed = (await (await call("/v1/audio/voices")).json()).voices;
  registered = listed.filter((voice) => !voice.alias_of);
  const names = registered.map((voice) => voice.id);
  const rows = names.map((name) => [name, name, true]);
  if (!names.length) rows.push(["", "the server's default voice", true]);
  voices.show([...rows, [OWN, "Your recording", false]], name);
}

/** Offers the languages of the model that speaks, each under its own name. */
function showLanguages(codes) {
  const chosen = $("language").value;
  const options = codes.map((code) => new Option(new Intl.DisplayNames([code], { type: "language" }).of(code), code));
  $("language").replaceChildren($("language").options[0], ...options);
  $("language").value = codes.includes(chosen) ? chosen : "";
  showExamples();
}

/** The language of the examples: the chosen one, else the browser's, if the model speaks it. */
function exampleLanguage() {
  const offered = [...$("language").options].map((option) => option.value);
  const own = $("demo").hidden ? navigator.languages.map((each) => each.slice(0, 2)) : []; // it speaks English only
  return $("language").value || own.find((code) => offered.includes(code)) || "en";
}

function showExamples() {
  const { voice, ...texts } = EXAMPLES[exampleLanguage()];
  $("examples").replaceChildren(...Object.entries(texts).map(([name, text]) => chip(name, () => write(text))));
}

/** Shows what is served; if nothing is, tries again until something is. */
async function showService() {
  clearTimeout(retry);
  retry = null;
  let away = false;
  try {
    const { models, max_input_chars: most } = await (await call("/v1/audio/models")).json();
    const served = models.filter((model) => !model.alias_of).map((model) => model.id);
    const speaker = models.find((model) => model.alias_of) ?? models[0];
    away = !speaker;
    if (speaker) {
      $("demo").hidden = !speaker.demo;
      $("instructed").hidden = $("own-instructed").hidden = !speaker.instructions;
      showLanguages(speaker.languages);
    }
    limit = most;
    count();
    await showVoices();
    const demo = speaker?.demo ? " · demo voice" : "";
    $("service").textContent = away ? "The model is starting. Trying again …" : served.join(", ") + demo;
  } catch (error) {
    away = error instanceof Unreachable;
    $("service").textContent = away ? `${error.message} Trying again …` : error.message;
  }
  if (away) retry = setTimeout(showService, 1000 * RETRY_SECONDS);
}

/** Asks whether the service is still there, while the page is looked at. */
async function watch() {
  if (document.hidden || retry) return;
  if (!(await fetch("/health").catch(() => ({ ok: false }))).ok) showService();
}

// --- the text ------------------------------------------------------------------------------------------------------

/** A small button. */
function chip(text, act) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  button.addEventListener("click", act);
  return button;
}

/** Replaces the whole text. It can be undone, unless the browser has no such command. */
function write(text) {
  $("text").focus();
  $("text").select();
  if (!document.execCommand("insertText", false, text)) $("text").value = text;
  typed();
}

function mark(before, after) {
  const area = $("text");
  const { selectionStart: begin, selectionEnd: end, value } = area;
  const other = voices.names.find((name) => name && name !== OWN && name !== voices.chosen) ?? voices.chosen;
  const first = value.slice(0, begin) + before.replace("NAME", other);
  const text = first + value.slice(begin, end) + after + value.slice(end);
  const whole = before.startsWith("<s") && !/^\s*<speak/.test(text) ? `<speak>${text}</speak>` : text;
  write(whole);
  const at = first.length + whole.indexOf(text) + (before.endsWith('"">') ? -2 : end - begin);
  area.setSelectionRange(at, at);
}

/** The length of the text beside the limit; the browser does not submit a text that is too long. */
function count() {
  const length = [...$("text").value].length;
  const excess = length > limit;
  $("count").textContent = `${length}${limit < Infinity ? ` of ${limit}` : ""} characters`;
  $("count").classList.toggle("wrong", excess);
  $("text").setCustomValidity(excess ? `The text has ${length - limit} characters too many.` : "");
}

function typed() {
  count();
  clearTimeout(typing);
  typing = setTimeout(preview, TYPING_MS);
}

async function preview() {
  clearTimeout(typing);
  if (!$("preview").open) return;
  const asked = $("text").value;
  let lines = [];
  let note = "";
  try {
    const { fields, recording } = requested(asked);
    const body = formOf(fields, recording);
    const { segments, seconds, warnings } = await (await call("/v1/audio/speech/text", { method: "POST", body })).json();
    lines = segments.map((segment, index) => {
      const line = document.createElement("li");
      line.textContent = `${segment || "(pause)"} — ${seconds[index].toFixed(1)} s`;
      return line;
    });
    note = (warnings ?? []).join(" ");
  } catch (error) {
    note = error.message;
  }
  if (asked !== $("text").value) return; // it has changed since
  $("segments").replaceChildren(...lines);
  $("preview-state").textContent = note;
}

// --- speaking ------------------------------------------------------------------------------------------------------

/** The request for a text in a voice with the settings of the page. */
function requested(text, voice = voices.chosen) {
  const seed = $("seed").value || String(Math.floor(Math.random() * SEEDS)); // always given, so that it can be repeated
  const fields = { input: text, response_format: $("format").value, seed };
  for (const name of SETTINGS) {
    const value = $(name).value.trim();
    if (value && !(name === "speed" && value === "1") && !$(name).closest("[hidden]")) fields[name] = value;
  }
  if (voice !== OWN) {
    if (voice) fields.voice = voice;
    return new Answer(fields, null);
  }
  const own = ownVoice();
  return new Answer({ ...own.fields, ...fields }, own.wav);
}

function say(text, wrong = false) {
  $("state").textContent = text;
  $("state").classList.toggle("wrong", wrong);
}

/** Speaks an answer that `requested` made. */
async function start(answer) {
  stop();
  shown = answer;
  const context = new AudioContext(); // in the handler of a click, because browsers play nothing before one
  const current = new AbortController();
  request = current;
  $("stop").disabled = false;
  $("about").hidden = false;
  $("replay").hidden = true;
  spoken.clear();
  ["first", "factor", "length", "played", "gaps"].forEach((id) => { $(id).textContent = "–"; });
  showCode();
  say("Waiting for the first audio …");
  try {
    await speak(answer, call, context, current.signal, {
      first: () => {
        $("first").textContent = `${Math.round(answer.firstMs)} ms`;
        say("Speaking …");
        if (!answer.source) expect(answer);
        requestAnimationFrame(keepPainting);
      },
      segments: (segments) => spoken.add(segments),
      complete: () => {
        $("factor").textContent = (answer.took / answer.seconds).toFixed(2);
        if (!answer.source) {
          past.add(answer);
          $("past").hidden = false;
        }
        offer(answer);
      },
    });
    const done = `Done: ${answer.seconds.toFixed(1)} seconds.`;
    say(current.signal.aborted ? "Stopped." : [done, ...answer.warnings].join(" "));
  } catch (error) {
    const known = error instanceof Unreachable || error instanceof Refused || !answer.firstMs;
    if (current.signal.aborted) say("Stopped.");
    else say(known ? error.message : `The speech was cut off: ${error.message}. Speak again.`, true);
    if (error instanceof Unreachable) showService();
    else watch();
  } finally {
    current.abort(); // ends the request if its audio could not be played; nothing is left to end otherwise
    await context.close();
    if (request === current) { // not if a newer request has replaced it
      paint();
      spoken.show(Infinity);
      request = null;
      $("stop").disabled = true;
      $("replay").hidden = !answer.blob;
    }
  }
}

/** The fields of the chosen voice. */
async function target() {
  if (voices.chosen === OWN) return { ref_audio: await dataUrlOf(ownVoice().wav) }; // a form has one file
  return voices.chosen ? { voice: voices.chosen } : {};
}

/** Speaks the chosen file in the chosen voice. */
async function convert() {
  const [source] = $("source").files;
  if (!source) return;
  const fields = { ...await target(), response_format: $("format").value };
  $("source").value = ""; // the same file can be chosen again
  await start(new Answer(fields, null, source));
}

/** Speaks in the chosen voice what the visitor says, until the same button is pressed again. */
async function convertLive() {
  if (request && shown?.source instanceof LiveSpeech) {
    shown.source.stop();
    return;
  }
  const fields = { ...await target(), response_format: "wav" };
  $("live").textContent = "Stop speaking";
  await start(new Answer(fields, null, new LiveSpeech($("key").value.trim())));
  $("live").textContent = "Speak live";
}

/** Shows the words before their times are known. Asked for after the first audio, which it would delay. */
async function expect(answer) {
  const { ref_text: transcript, ...fields } = answer.fields;
  const speed = Number(fields.speed ?? 1);
  const reply = await call("/v1/audio/speech/text", { method: "POST", body: formOf(fields) }).catch(() => null);
  const { segments, seconds } = await reply?.json() ?? {};
  if (segments && shown === answer && !answer.blob) spoken.expect(segments, seconds.map((each) => each / speed));
}

function stop() {
  request?.abort();
  shown?.player?.stop();
  $("replay").pause();
}

/** Makes an answer the one that the player and the code are about. */
function offer(answer) {
  shown = answer;
  answer.url ??= URL.createObjectURL(answer.blob); // of a conversion: the others are in the history
  $("replay").src = answer.url;
  showCode();
}

function replay(answer) {
  stop();
  offer(answer);
  spoken.clear();
  spoken.add(answer.segments);
  $("replay").hidden = false;
  $("replay").play();
  say(`Speaking again: ${answer.seconds.toFixed(1)} seconds.`);
}

/** Puts the text and the settings of an answer back. */
function reuse({ fields, recording }) {
  write(fields.input);
  SETTINGS.forEach((name) => { $(name).value = fields[name] ?? (name === "speed" ? "1" : ""); });
  $("seed").value = fields.seed;
  $("format").value = fields.response_format;
  voices.chosen = recording ? OWN : fields.voice ?? "";
  showSpeed();
  showExamples();
}

function showCode() {
  const language = document.querySelector("input[name=program]:checked").value;
  const hasKey = $("key").value.trim() !== "";
  $("code").textContent = shown && !shown.source ? codeOf(language, shown.fields, shown.recording, location.origin, hasKey) : "";
  $("copied").textContent = "";
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("code").textContent);
    $("copied").textContent = "Copied.";
  } catch { // without https, or not allowed
    getSelection().selectAllChildren($("code"));
    $("copied").textContent = "Selected: press Ctrl + C.";
  }
}

function paint() {
  const player = shown?.player;
  if (!player) return;
  const { parts, samples, seconds } = player;
  const again = !request && (!$("replay").paused || $("replay").currentTime > 0);
  const played = again ? $("replay").currentTime : player.played;
  draw($("wave"), parts, samples, seconds ? played / seconds : 0);
  spoken.show(request || (again && !$("replay").ended) ? played : Infinity);
  $("wave").setAttribute("aria-label", `Waveform of ${seconds.toFixed(1)} seconds`);
  $("length").textContent = `${seconds.toFixed(2)} s${player.complete ? "" : " so far"}`;
  $("played").textContent = `${played.toFixed(1)} s`;
  $("gaps").textContent = String(player.gaps);
}

function keepPainting() {
  if (!request && $("replay").paused) return;
  paint();
  requestAnimationFrame(keepPainting);
}

// --- controls ------------------------------------------------------------------------------------------------------

function showSpeed() { $("speed-shown").textContent = `${$("speed").value}×`; }

$("marks").replaceChildren(...Object.entries(MARKS).map(([name, [before, after]]) => chip(name, () => mark(before, after))));
$("text").addEventListener("input", typed);
$("speed").addEventListener("input", showSpeed);
$("speech").addEventListener("submit", (event) => {
  event.preventDefault();
  try {
    start(requested($("text").value));
  } catch (error) {
    say(error.message, true);
  }
});
$("source").addEventListener("change", () => convert().catch((error) => say(error.message, true)));
$("live").addEventListener("click", () => convertLive().catch((error) => say(error.message, true)));
["voices", "language", "pronunciation"].forEach((id) => $(id).addEventListener("change", preview));
$("language").addEventListener("change", showExamples);
$("voices").addEventListener("change", () => {
  showRights(registered.find((voice) => voice.id === voices.chosen));
});
$("preview").addEventListener("toggle", preview);
$("stop").addEventListener("click", stop);
$("replay").addEventListener("play", () => requestAnimationFrame(keepPainting));
$("replay").addEventListener("seeked", paint);
$("wave").closest("details").addEventListener("toggle", paint);
$("languages").addEventListener("change", showCode);
$("copy").addEventListener("click", copy);
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  showCode();
  showService();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("speech").requestSubmit();
  if (event.key === "Escape") stop();
});
window.addEventListener("resize", paint);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
count();
showService();
setInterval(watch, 1000 * WATCH_SECONDS);
document.addEventListener("visibilitychange", watch);

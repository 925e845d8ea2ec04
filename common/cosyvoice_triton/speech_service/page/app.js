// The page: uses the service's public API and plays the answer while it arrives.

import { Player, draw } from "/static/player.js";
import { Microphone, asWav } from "/static/recorder.js";
import { SampleReader, wavOf } from "/static/wav.js";

const $ = (id) => document.getElementById(id);
const OWN = "\u0000own"; // not a valid name of a voice
const microphone = new Microphone();
let own = null; // { wav, seconds }
let player = null;
let request = null; // AbortController of the live request
let limit = Infinity; // of characters
let retry = null; // timer, while the service is away
const RETRY_SECONDS = 2;

// --- the service ---------------------------------------------------------------------------------------------------

class Unreachable extends Error {}

async function call(path, options = {}) {
  const key = $("key").value.trim();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The service does not answer.");
  });
  if (answer.ok) return answer;
  if (answer.status === 401) $("settings").open = true;
  const body = await answer.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the service answered ${answer.status}`);
}

async function showVoices(chosen = $("voice").value) {
  const voices = (await (await call("/v1/audio/voices")).json()).voices;
  const names = voices.filter((voice) => !voice.alias_of).map((voice) => voice.id);
  const options = [...names.map((name) => new Option(name, name)), new Option("Your recording", OWN)];
  if (!names.length) options.unshift(new Option("the server's default voice", ""));
  $("voice").replaceChildren(...options);
  $("voice").value = options.some((option) => option.value === chosen) ? chosen : options[0].value;
}

/** Offers the languages of the model that speaks. */
function showLanguages(spoken) {
  [...$("language").options].forEach((option) => {
    option.disabled = option.hidden = option.value !== "" && !spoken.includes(option.value);
  });
  if ($("language").selectedOptions[0]?.disabled) $("language").value = "";
}

/** Shows what is served; if nothing is, tries again until something is. */
async function showService() {
  clearTimeout(retry);
  let away = false;
  try {
    const { models, max_input_chars: most } = await (await call("/v1/audio/models")).json();
    const served = models.filter((model) => !model.alias_of).map((model) => model.id);
    away = !served.length;
    if (!away) showLanguages((models.find((model) => model.alias_of) ?? models[0]).languages);
    limit = most;
    count();
    await showVoices();
    $("service").textContent = away ? "No Triton is available. Trying again …" : served.join(", ");
  } catch (error) {
    away = error instanceof Unreachable;
    $("service").textContent = away ? `${error.message} Trying again …` : error.message;
  }
  if (away) retry = setTimeout(showService, 1000 * RETRY_SECONDS);
}

// --- speaking ------------------------------------------------------------------------------------------------------

function say(text, wrong = false) {
  $("state").textContent = text;
  $("state").classList.toggle("wrong", wrong);
}

function bodyOf(text) {
  const fields = new FormData();
  const put = { input: text, response_format: "pcm" };
  ["speed", "instructions", "language", "pronunciation"].forEach((name) => { put[name] = $(name).value; });
  Object.entries(put).forEach(([name, value]) => fields.append(name, value));
  if ($("voice").value !== OWN) {
    fields.append("voice", $("voice").value);
  } else if (own) {
    fields.append("ref_audio", own.wav, "recording.wav");
    if (!$("instructions").value.trim()) fields.append("ref_text", $("own-text").value);
  } else {
    $("own").open = true;
    throw new Error("Record a voice or choose a file first.");
  }
  return fields;
}

async function preview() {
  if (!$("preview").open) return;
  let shown = "";
  try {
    const body = bodyOf($("text").value);
    const { segments, seconds, warnings } = await (await call("/v1/audio/speech/text", { method: "POST", body })).json();
    $("segments").replaceChildren(...segments.map((segment, index) => {
      const line = document.createElement("li");
      line.textContent = `${segment || "(pause)"} — ${seconds[index].toFixed(1)} s`;
      return line;
    }));
    shown = (warnings ?? []).join(" ");
  } catch (error) {
    $("segments").replaceChildren();
    shown = error.message;
  }
  $("preview-state").textContent = shown;
}

async function speak() {
  stop();
  player = null;
  const context = new AudioContext();
  const current = new AbortController();
  request = current;
  $("play").disabled = true;
  $("stop").disabled = false;
  $("download").hidden = true;
  $("replay").hidden = true;
  $("replay").pause();
  ["first", "factor", "length", "played", "gaps"].forEach((id) => { $(id).textContent = "–"; });
  say("Waiting for the first audio …");
  const started = performance.now();
  try {
    const answer = await call("/v1/audio/speech", { method: "POST", body: bodyOf($("text").value), signal: current.signal });
    player = new Player(context, Number(answer.headers.get("x-sample-rate")));
    const reader = new SampleReader();
    const stream = answer.body.getReader();
    for (let piece = await stream.read(); !piece.done; piece = await stream.read()) {
      if (!player.samples) {
        $("first").textContent = `${Math.round(performance.now() - started)} ms`;
        say("Speaking …");
        requestAnimationFrame(keepPainting);
      }
      player.add(reader.take(piece.value));
    }
    player.complete = true;
    const seconds = (performance.now() - started) / 1000;
    $("factor").textContent = (seconds / player.seconds).toFixed(2);
    offer();
    while (player.sounding && !current.signal.aborted) await new Promise((wait) => setTimeout(wait, 50));
    const warning = decodeURIComponent(answer.headers.get("x-speech-warning") ?? "");
    say(current.signal.aborted ? "Stopped." : `Done: ${player.seconds.toFixed(1)} seconds. ${warning}`.trim());
  } catch (error) {
    if (current.signal.aborted) say("Stopped.");
    else say(player?.samples ? `The answer was cut off: ${error.message}` : error.message, true);
    if (error instanceof Unreachable) showService();
  } finally {
    current.abort(); // ends the request if its audio could not be played; nothing is left to end otherwise
    await context.close();
    if (request === current) { // not if a newer request has replaced it
      request = null;
      $("play").disabled = false;
      $("stop").disabled = true;
      $("replay").hidden = $("download").hidden;
    }
  }
}

function stop() {
  request?.abort();
  player?.stop();
}

function offer() {
  URL.revokeObjectURL($("download").href);
  $("download").href = URL.createObjectURL(wavOf(player.parts, player.rate));
  $("replay").src = $("download").href;
  $("download").hidden = false;
}

function paint() {
  if (!player) return;
  const { parts, samples, seconds, played } = player;
  draw($("wave"), parts, samples, seconds ? played / seconds : 0);
  $("wave").setAttribute("aria-label", `Waveform of ${seconds.toFixed(1)} seconds`);
  $("length").textContent = `${seconds.toFixed(2)} s${player.complete ? "" : " so far"}`;
  $("played").textContent = `${played.toFixed(1)} s`;
  $("gaps").textContent = String(player.gaps);
}

function keepPainting() {
  paint();
  if (request) requestAnimationFrame(keepPainting);
}

// --- the user's own voice --------------------------------------------------------------------------------------------

async function keep(blob) {
  try {
    own = await asWav(blob);
  } catch {
    $("own-state").textContent = "The browser cannot decode this file.";
    return;
  }
  URL.revokeObjectURL($("own-player").src);
  $("own-player").src = URL.createObjectURL(own.wav);
  $("own-player").hidden = false;
  $("own-state").textContent = `${own.seconds.toFixed(1)} seconds, selected as the voice.`;
  $("voice").value = OWN;
  $("save").disabled = false;
}

async function record() {
  if (microphone.running) {
    microphone.stop();
    return;
  }
  try {
    const recorded = microphone.record((seconds) => { $("own-state").textContent = `Recording: ${seconds.toFixed(0)} s`; });
    $("record").textContent = "Stop recording";
    await keep(await recorded);
  } catch (error) {
    $("own-state").textContent = `The microphone cannot be used: ${error.message}`;
  } finally {
    $("record").textContent = "Record";
  }
}

async function save() {
  if (!$("name").value.trim()) {
    $("name").focus();
    throw new Error("Give the voice a name first.");
  }
  const fields = new FormData();
  fields.append("name", $("name").value.trim());
  fields.append("ref_text", $("own-text").value);
  fields.append("audio_sample", own.wav, "recording.wav");
  const voice = await (await call("/v1/audio/voices", { method: "POST", body: fields })).json();
  await showVoices(voice.id);
  $("own-state").textContent = [`Saved as ${voice.id}.`, ...(voice.warnings ?? [])].join(" ");
}

async function remove() {
  const name = $("voice").value;
  if (name === OWN || !name || !window.confirm(`Delete the voice ${name}?`)) return;
  await call(`/v1/audio/voices/${encodeURIComponent(name)}`, { method: "DELETE" });
  await showVoices();
  $("own-state").textContent = `Deleted ${name}.`;
}

const showingErrors = (work) => () => work().catch((error) => { $("own-state").textContent = error.message; });

// --- user input --------------------------------------------------------------------------------------------------

/** The length of the text beside the limit; the browser does not submit a text that is too long. */
function count() {
  const length = [...$("text").value].length;
  const excess = length > limit;
  $("count").textContent = `${length}${limit < Infinity ? ` of ${limit}` : ""} characters`;
  $("count").classList.toggle("wrong", excess);
  $("text").setCustomValidity(excess ? `The text has ${length - limit} characters too many.` : "");
}
$("text").addEventListener("input", count);
$("speed").addEventListener("input", () => { $("speed-shown").textContent = `${$("speed").value}×`; });
$("speech").addEventListener("submit", (event) => {
  event.preventDefault();
  speak();
});
["text", "voice", "language", "pronunciation"].forEach((id) => $(id).addEventListener("change", preview));
$("preview").addEventListener("toggle", preview);
$("stop").addEventListener("click", stop);
$("file").addEventListener("change", () => { if ($("file").files.length) keep($("file").files[0]); });
$("record").addEventListener("click", record);
$("save").addEventListener("click", showingErrors(save));
$("remove").addEventListener("click", showingErrors(remove));
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
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

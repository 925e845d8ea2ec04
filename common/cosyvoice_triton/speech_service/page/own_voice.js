// The visitor's own voice: recorded or chosen, trimmed, judged by the service, used, kept under a name.

import { formOf } from "/static/api.js";
import { draw } from "/static/player.js";
import { Microphone, decoded, microphoneProblem } from "/static/recorder.js";

const $ = (id) => document.getElementById(id);
const SAID = [[0.4, "too quiet: nearer to the microphone"], [0.9, "good"], [1.01, "too loud: farther away, or less gain"]];
const SHORTEST = 0.5; // seconds that the service accepts
const SHORT = 3;
const microphone = new Microphone();
let recording = null;
let judging = 0;

/** The fields of a request for it. Error without a recording. */
export function ownVoice() {
  if (!recording) {
    $("own").open = true;
    throw new Error("Record a voice or choose a file first.");
  }
  const trim = $("own-trim").checked && "true";
  const given = { ref_text: $("own-text").value.trim(), instructions: style(), trim_reference: trim };
  const fields = Object.fromEntries(Object.entries(given).filter(([, text]) => text));
  return { fields, wav: recording.wav };
}

/** How the voice speaks; "" if the model follows no instructions. */
const style = () => ($("own-instructed").hidden ? "" : $("own-style").value.trim());

/** call: of the API. use: called when there is a recording to speak with. saved: with the name of a new voice. */
export function setUp(call, use, saved) {
  const say = (text, wrong = false) => {
    $("own-state").textContent = text;
    $("own-state").classList.toggle("wrong", wrong);
  };

  async function keep(blob) {
    try {
      recording = await decoded(blob);
    } catch {
      say("The browser cannot read this file. Choose a WAV, MP3, M4A or OGG file.", true);
      return;
    }
    for (const id of ["begin", "end"]) {
      $(id).max = recording.whole;
      $(id).value = recording[id];
    }
    $("trim").hidden = false;
    $("save").disabled = false;
    use();
    trimmed();
    await changed();
  }

  /** Shows what is used of the recording. */
  function trimmed() {
    recording.begin = Math.min(Number($("begin").value), recording.whole - 0.1);
    recording.end = Math.max(Number($("end").value), recording.begin + 0.1);
    for (const id of ["begin", "end"]) {
      $(id).value = recording[id];
      $(`${id}-shown`).textContent = `${recording[id].toFixed(2)} s`;
    }
    const share = (seconds) => seconds / recording.whole;
    draw($("own-wave"), [recording.samples], recording.samples.length, share(recording.end), share(recording.begin));
  }

  /** Lets it be heard, and the service judge it. */
  async function changed() {
    if (!recording) return;
    URL.revokeObjectURL($("own-player").src);
    $("own-player").src = URL.createObjectURL(recording.wav);
    say(`${recording.seconds.toFixed(1)} seconds, selected as the voice.`);
    const asked = judging += 1;
    const { fields, wav } = ownVoice();
    const body = formOf({ ...fields, input: "Hello." }, wav);
    const found = recording.seconds < SHORTEST ? [] : await call("/v1/audio/speech/text", { method: "POST", body })
      .then(async (answer) => (await answer.json()).warnings ?? [], (error) => [error.message]);
    if (asked !== judging) return; // it has changed since
    if (recording.seconds < SHORTEST) found.push("It is too short: speak for 5 to 10 seconds.");
    else if (recording.seconds < SHORT) found.push("It is short: 5 to 10 seconds sound more like the person.");
    $("judgement").replaceChildren(...(found.length ? found : ["Nothing to mend."]).map((text) => {
      const line = document.createElement("li");
      line.textContent = text.replace(/^the recording/, "The recording");
      return line;
    }));
    $("judgement").classList.toggle("good", !found.length);
  }

  async function record() {
    if (microphone.running) {
      microphone.stop();
      return;
    }
    try {
      const recorded = microphone.record((seconds, level) => {
        $("recorded").textContent = seconds.toFixed(1);
        $("level").value = level;
        $("level-said").textContent = SAID.find(([below]) => level < below)[1];
      });
      $("record").textContent = "Stop recording";
      $("recording").hidden = false;
      say("Recording. Speak now.");
      await keep(await recorded);
    } catch (error) {
      say(microphoneProblem(error), true);
    } finally {
      $("record").textContent = "Record";
      $("recording").hidden = true;
    }
  }

  async function save() {
    const name = $("name").value.trim();
    if (!name) {
      $("name").focus();
      throw new Error("Give the voice a name first.");
    }
    const body = new FormData();
    body.append("name", name);
    body.append("ref_text", $("own-text").value.trim());
    body.append("instructions", style());
    body.append("trim_reference", $("own-trim").checked);
    body.append("pronunciation", $("own-words").value);
    body.append("consent", $("consent").value.trim());
    body.append("audio_sample", recording.wav, "recording.wav");
    const voice = await (await call("/v1/audio/voices", { method: "POST", body })).json();
    await saved(voice.id);
    say([`Saved as ${voice.id}.`, ...(voice.warnings ?? [])].join(" "));
  }

  ["begin", "end"].forEach((id) => {
    $(id).addEventListener("input", trimmed);
    $(id).addEventListener("change", changed);
  });
  $("own-text").addEventListener("change", changed);
  $("file").addEventListener("change", () => { if ($("file").files.length) keep($("file").files[0]); });
  $("record").addEventListener("click", record);
  $("save").addEventListener("click", () => save().catch((error) => say(error.message, true)));
  $("own").addEventListener("toggle", () => { if (recording) trimmed(); });
}

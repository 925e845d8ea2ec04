// The visitor's recording: from a file or the microphone, trimmed, as a WAV that the service reads.

import { wavOf } from "/static/wav.js";

const RATE = 24000; // of a reference recording: no network reads more
const MAX_SECONDS = 30;
const QUIETEST = -60; // dBFS at the left end of the meter

/** Samples, of which those from `begin` to `end`, in seconds, are used. */
export class Recording {
  constructor(samples) {
    this.samples = samples;
    this.begin = 0;
    this.end = this.whole;
  }

  get whole() { return this.samples.length / RATE; }

  get seconds() { return this.end - this.begin; }

  get wav() { return wavOf([this.samples.subarray(Math.round(this.begin * RATE), Math.round(this.end * RATE))], RATE); }
}

/** Any audio that the browser can decode, as a Recording of its first MAX_SECONDS. */
export async function decoded(blob) {
  const probe = new OfflineAudioContext(1, 1, RATE); // decodes to its own sample rate
  const sound = await probe.decodeAudioData(await blob.arrayBuffer());
  const mixer = new OfflineAudioContext(1, Math.min(sound.length, MAX_SECONDS * RATE), RATE);
  const source = mixer.createBufferSource();
  source.buffer = sound;
  source.connect(mixer.destination);
  source.start();
  return new Recording(int16((await mixer.startRendering()).getChannelData(0)));
}

export const int16 = (floats) => Int16Array.from(floats, (value) => Math.round(Math.max(-1, Math.min(1, value)) * 32767));

/** What went wrong with the microphone, in a visitor's words. */
export function microphoneProblem(error) {
  if (!navigator.mediaDevices) return "The microphone works on pages with https, and on localhost. Choose an audio file.";
  if (error.name === "NotAllowedError") return "The browser may not use the microphone. Allow it beside the address, or choose a file.";
  if (error.name === "NotFoundError") return "There is no microphone. Choose an audio file.";
  return `The microphone cannot be used: ${error.message}`;
}

export class Microphone {
  #recorder = null;

  get running() { return this.#recorder !== null; }

  /** onLevel: called with the recorded seconds and the level, 0 to 1 (full scale). Resolves to a Blob when `stop` is
   * called or the limit is reached. */
  async record(onLevel) {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    const recorder = new MediaRecorder(stream);
    const context = new AudioContext();
    const meter = context.createAnalyser();
    context.createMediaStreamSource(stream).connect(meter);
    const heard = new Float32Array(meter.fftSize);
    const pieces = [];
    const started = performance.now();
    this.#recorder = recorder;
    const clock = setInterval(() => {
      const seconds = (performance.now() - started) / 1000;
      meter.getFloatTimeDomainData(heard);
      const peak = heard.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-6);
      onLevel(seconds, Math.max(0, 1 - (20 * Math.log10(peak)) / QUIETEST));
      if (seconds >= MAX_SECONDS) this.stop();
    }, 100);
    return new Promise((resolve) => {
      recorder.ondataavailable = (event) => pieces.push(event.data);
      recorder.onstop = () => {
        clearInterval(clock);
        stream.getTracks().forEach((track) => track.stop());
        context.close();
        this.#recorder = null;
        resolve(new Blob(pieces, { type: recorder.mimeType }));
      };
      recorder.start();
    });
  }

  stop() { this.#recorder?.stop(); }
}

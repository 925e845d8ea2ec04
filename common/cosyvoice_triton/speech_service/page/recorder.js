// The user's recording, from a file or the microphone, converted to a format that the service reads.

import { wavOf } from "/static/wav.js";

const RATE = 24000; // of a reference recording: no network reads more
const MAX_SECONDS = 30;

/** Any audio that the browser can decode -> a 16-bit WAV at RATE Hz, and its length in seconds. */
export async function asWav(blob) {
  const probe = new OfflineAudioContext(1, 1, RATE); // decodes to its own sample rate
  const sound = await probe.decodeAudioData(await blob.arrayBuffer());
  const mixer = new OfflineAudioContext(1, Math.min(sound.length, MAX_SECONDS * RATE), RATE);
  const source = mixer.createBufferSource();
  source.buffer = sound;
  source.connect(mixer.destination);
  source.start();
  const floats = (await mixer.startRendering()).getChannelData(0);
  const samples = Int16Array.from(floats, (value) => Math.round(Math.max(-1, Math.min(1, value)) * 32767));
  return { wav: wavOf([samples], RATE), seconds: samples.length / RATE };
}

export class Microphone {
  #recorder = null;

  get running() { return this.#recorder !== null; }

  /** onSeconds: called with the recorded seconds. Resolves to a Blob when `stop` is called or the limit is reached. */
  async record(onSeconds) {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    const recorder = new MediaRecorder(stream);
    const pieces = [];
    const started = performance.now();
    this.#recorder = recorder;
    const clock = setInterval(() => {
      const seconds = (performance.now() - started) / 1000;
      onSeconds(seconds);
      if (seconds >= MAX_SECONDS) this.stop();
    }, 200);
    return new Promise((resolve) => {
      recorder.ondataavailable = (event) => pieces.push(event.data);
      recorder.onstop = () => {
        clearInterval(clock);
        stream.getTracks().forEach((track) => track.stop());
        this.#recorder = null;
        resolve(new Blob(pieces, { type: recorder.mimeType }));
      };
      recorder.start();
    });
  }

  stop() { this.#recorder?.stop(); }
}

// Speech that is converted while somebody speaks it into the microphone.

import { int16, microphoneProblem } from "/static/recorder.js";

const PATH = "/v1/audio/voice-conversion/stream";
const KEY_PROTOCOL = "openai-insecure-api-key."; // a browser's WebSocket sends no headers

export class LiveSpeech {
  #key;
  #stop = () => {};

  /** key: of the API, "" if there is none. */
  constructor(key) { this.#key = key; }

  /** Ends the speech; what was said is still converted. */
  stop() { this.#stop(); }

  /** Yields the answer's events, as those of a request, until the speech has ended and all of it came. */
  async* converted(fields, context, signal) {
    const { response_format: _, ...voice } = fields;
    const came = [];
    let wake = () => {};
    const tell = (event) => { came.push(event); wake(); };
    await context.audioWorklet?.addModule("/static/microphone.js"); // before the socket, which tells once that it is open
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    } catch (error) {
      throw new Error(microphoneProblem(error));
    }
    const socket = new WebSocket(location.origin.replace(/^http/, "ws") + PATH, this.#key ? [KEY_PROTOCOL + this.#key] : []);
    socket.binaryType = "arraybuffer";
    const send = (type, fields = {}) => socket.send(JSON.stringify({ type, ...fields }));
    try {
      const microphone = new AudioWorkletNode(context, "microphone", { numberOfOutputs: 0 });
      socket.onopen = () => {
        send("session.config", { ...voice, input_sample_rate: context.sampleRate });
        microphone.port.onmessage = ({ data }) => { if (socket.readyState === WebSocket.OPEN) socket.send(int16(data)); };
        context.createMediaStreamSource(stream).connect(microphone);
        this.#stop = () => {
          microphone.port.onmessage = null;
          if (socket.readyState === WebSocket.OPEN) send("input.done");
        };
      };
      socket.onmessage = ({ data }) => tell(typeof data === "string" ? JSON.parse(data) : { type: "bytes", data });
      socket.onclose = () => tell({ type: "closed" });
      signal.addEventListener("abort", () => tell({ type: "closed" }));
      const warnings = [];
      for (;;) {
        while (!came.length) await new Promise((resolve) => { wake = resolve; });
        const event = came.shift();
        if (event.type === "bytes") yield { type: "speech.audio.delta", bytes: new Uint8Array(event.data) };
        else if (event.type === "warning") warnings.push(event.message);
        else if (event.type === "error") throw new Error(event.error.message);
        else if (event.type === "closed") return;
        else if (event.type === "audio.done") {
          yield { type: "speech.audio.done", warnings };
          return;
        }
      }
    } finally {
      stream.getTracks().forEach((track) => track.stop());
      socket.close();
    }
  }
}

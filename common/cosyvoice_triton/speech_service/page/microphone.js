// The microphone's samples, in pieces of SIZE. Runs in the thread of the audio.

const SIZE = 2048;

registerProcessor("microphone", class extends AudioWorkletProcessor {
  #piece = new Float32Array(SIZE);
  #used = 0;

  process([[samples]]) {
    if (!samples) return true;
    this.#piece.set(samples, this.#used); // 128 of them, a divisor of SIZE
    this.#used += samples.length;
    if (this.#used === SIZE) {
      this.port.postMessage(this.#piece);
      this.#used = 0;
    }
    return true;
  }
});

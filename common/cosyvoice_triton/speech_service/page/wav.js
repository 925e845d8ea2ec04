// Samples and WAV files.

const HEADER = 44;

/** A 16-bit mono WAV of Int16Array parts. */
export function wavOf(parts, rate) {
  const bytes = parts.reduce((sum, part) => sum + part.byteLength, 0);
  const view = new DataView(new ArrayBuffer(HEADER));
  const text = (at, letters) => [...letters].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, HEADER - 8 + bytes, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, bytes, true);
  return new Blob([view, ...parts], { type: "audio/wav" });
}

/** Turns pieces of bytes of any length into Int16Arrays of whole samples. */
export class SampleReader {
  #rest = new Uint8Array(0);

  take(piece) {
    const all = new Uint8Array(this.#rest.length + piece.length);
    all.set(this.#rest);
    all.set(piece, this.#rest.length);
    const whole = all.length - (all.length % 2);
    this.#rest = all.slice(whole);
    return new Int16Array(all.slice(0, whole).buffer);
  }
}

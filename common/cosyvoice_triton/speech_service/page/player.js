// Plays samples as they arrive, one buffer after another, and draws the waveform.

const LEAD_SECONDS = 0.06; // from the first samples to their playback, so that the browser can schedule in time

export class Player {
  /** context: created in a click handler, because browsers require a user action before playback. */
  constructor(context, rate) {
    this.context = context;
    this.rate = rate;
    this.parts = [];
    this.samples = 0;
    this.gaps = 0;
    this.begin = 0; // in the context's time, as if without gaps
    this.end = 0;
    this.nodes = new Set();
  }

  add(part) {
    if (!part.length) return;
    const now = this.context.currentTime;
    if (this.end < now) {
      if (this.samples) this.gaps += 1;
      const late = now + LEAD_SECONDS - this.end;
      this.begin += late;
      this.end += late;
    }
    const buffer = this.context.createBuffer(1, part.length, this.rate);
    const floats = buffer.getChannelData(0);
    for (let i = 0; i < part.length; i += 1) floats[i] = part[i] / 32768;
    const node = this.context.createBufferSource();
    node.buffer = buffer;
    node.connect(this.context.destination);
    node.onended = () => this.nodes.delete(node);
    node.start(this.end);
    this.nodes.add(node);
    this.end += buffer.duration;
    this.parts.push(part);
    this.samples += part.length;
  }

  get seconds() { return this.samples / this.rate; }

  /** Seconds that have been played. */
  get played() { return Math.max(0, Math.min(this.seconds, this.context.currentTime - this.begin)); }

  get sounding() { return this.nodes.size > 0; }

  stop() {
    for (const node of this.nodes) node.stop();
    this.nodes.clear();
  }
}

/** Draws the peaks of equal spans as bars; those from one share of the samples to another in the accent colour. */
export function draw(canvas, parts, samples, toShare, fromShare = 0) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(canvas.clientWidth * scale));
  const height = Math.max(1, Math.round(canvas.clientHeight * scale));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  const colours = getComputedStyle(document.documentElement);
  pen.clearRect(0, 0, width, height);
  if (!samples) return;
  const step = 3 * scale;
  const bars = Math.floor(width / step);
  const peaks = new Float32Array(bars);
  let at = 0;
  for (const part of parts) {
    for (let i = 0; i < part.length; i += 4, at += 4) {
      const bar = Math.min(bars - 1, Math.floor((at / samples) * bars));
      peaks[bar] = Math.max(peaks[bar], Math.abs(part[i]) / 32768);
    }
  }
  const full = Math.max(0.1, ...peaks); // quiet speech is scaled up, silence is not
  for (let bar = 0; bar < bars; bar += 1) {
    const tall = Math.max(scale, (peaks[bar] / full) * (height - 2 * scale));
    const inside = bar / bars >= fromShare && bar / bars < toShare;
    pen.fillStyle = colours.getPropertyValue(inside ? "--accent" : "--wave");
    pen.fillRect(bar * step, (height - tall) / 2, step - scale, tall);
  }
}

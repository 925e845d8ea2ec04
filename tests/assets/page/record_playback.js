// Records the audio that is really played, and the words that are marked. A slow browser reads many seconds at once:
// too many for a call's arguments.
window.played = [];
window.marked = new Set();
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (...when) {
  const samples = this.buffer.getChannelData(0);
  const peak = samples.reduce((most, sample) => Math.max(most, Math.abs(sample)), 0);
  window.played.push({ rate: this.buffer.sampleRate, size: samples.length, peak });
  return start.apply(this, when);
};
new MutationObserver(() => document.querySelectorAll(".now").forEach((word) => window.marked.add(word.textContent)))
  .observe(document, { subtree: true, attributes: true, attributeFilter: ["class"] });

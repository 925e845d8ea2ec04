"""JavaScript that tests run in the web page."""

# Records the audio that is really played, and the words that are marked. A slow browser reads many seconds at once: too
# many for a call's arguments.
RECORD_PLAYBACK = """
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
"""

# The contrast of every text with what is behind it (WCAG 1.4.3), where it is below 4.5.
POOR_CONTRASTS = """() => {
  const levels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const bright = (colour) => levels(colour).slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (levels(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  return [...document.querySelectorAll("body *")]
    .filter((each) => each.checkVisibility() && !each.matches(":disabled, option"))
    .filter((each) => each.value || [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .map((each) => [each, [bright(getComputedStyle(each).color), bright(ground(each))].sort((a, b) => b - a)])
    .filter(([, [light, dark]]) => (light + 0.05) / (dark + 0.05) < 4.5)
    .map(([each]) => each.outerHTML.slice(0, 80));
}"""

CONTROLS = """() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary, audio, pre")]
  .filter((each) => each.checkVisibility() && !each.disabled && !each.matches("input[type=radio]:not(:checked)"))"""

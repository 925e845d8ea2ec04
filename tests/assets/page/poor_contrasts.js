// The contrast of every text with what is behind it (WCAG 1.4.3), where it is below 4.5.
() => {
  const levels = (colour) => colour.match(/[\d.]+/g).map(Number);
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
}

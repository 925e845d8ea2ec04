// What can be reached by the Tab key.
() => [...document.querySelectorAll("a[href], button, input, select, textarea, summary, audio, pre")]
  .filter((each) => each.checkVisibility() && !each.disabled && !each.matches("input[type=radio]:not(:checked)"))

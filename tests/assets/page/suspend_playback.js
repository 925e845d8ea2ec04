// Every playback from now on is paused at its start.
() => {
  const Context = window.AudioContext;
  window.AudioContext = function () {
    const context = new Context();
    context.suspend();
    return context;
  };
}

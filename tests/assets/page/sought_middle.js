// The duration of an audio element, and the share at which it stands after it was told to go to its middle.
async (audio) => {
  if (!audio.duration) await new Promise((loaded) => { audio.onloadedmetadata = loaded; });
  audio.currentTime = audio.duration / 2;
  await new Promise((sought) => { audio.addEventListener("seeked", sought); });
  return [audio.duration, audio.currentTime / audio.duration];
}

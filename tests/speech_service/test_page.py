"""The page in a real Chromium, with the real tritonserver."""

import re
import shutil
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from cosyvoice_triton.constants import SAMPLE_RATE

from tests.conftest import ROOT
from tests.support.speech_fixtures import RECORDING, VOICE, SpeechStack, until

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: sudo apt-get install chromium"),
]

OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update"),
    *("--disable-background-networking", "--disable-sync"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),  # a microphone that beeps
]
LONG = "This sentence is one of many that follow each other for quite a while. " * 50
SECOND = 1000.0

# Records the audio that is really played. A slow browser reads many seconds at once: too many for a call's arguments.
RECORD_PLAYBACK = """
window.played = [];
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (...when) {
  const samples = this.buffer.getChannelData(0);
  const peak = samples.reduce((most, sample) => Math.max(most, Math.abs(sample)), 0);
  window.played.push({ rate: this.buffer.sampleRate, size: samples.length, peak });
  return start.apply(this, when);
};
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, speech_stack: SpeechStack) -> Iterator[Any]:
    """The page, opened; it must have no errors and send requests to the service only."""
    context = browser.new_context(viewport={"width": 760, "height": 900}, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(60 * SECOND)
    requested: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.add_init_script(RECORD_PLAYBACK)
    page.goto(f"{speech_stack.url}/")
    page.locator(f"#voice option[value={VOICE}]").wait_for(state="attached")
    yield page
    context.close()
    assert [url for url in requested if not url.startswith((speech_stack.url, f"blob:{speech_stack.url}"))] == []
    ignored = "Failed to load resource"  # logged by the browser for status codes such as 400, which the page handles
    assert [error for error in errors if not error.startswith(ignored)] == []


def state(page: Any, text: str) -> None:
    """Wait until the page's status contains `text`; an error there ends the wait."""
    status = page.locator("#state")
    status.filter(has_text=text).or_(page.locator("#state.wrong")).wait_for()
    assert text in status.inner_text()


def cancelled(stack: SpeechStack) -> float:
    """How many requests ended because their client disconnected."""
    lines = httpx.get(f"{stack.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if 'status="gone"' in line and "_total{" in line)


def test_a_typed_text_is_spoken_played_and_can_be_downloaded(page: Any, tmp_path: Path) -> None:
    page.get_by_label("Text", exact=True).fill("Hello. This is typed into the page and spoken by a machine.")
    page.get_by_label("Voice", exact=True).select_option(VOICE)
    page.get_by_role("button", name="Speak", exact=True).click()
    state(page, "Done:")
    played = page.evaluate("window.played")
    seconds = sum(part["size"] for part in played) / SAMPLE_RATE
    assert seconds > 1
    assert all(part["rate"] == SAMPLE_RATE for part in played) and max(part["peak"] for part in played) > 0.01
    assert re.fullmatch(r"\d+ ms", page.locator("#first").inner_text())
    assert float(page.locator("#factor").inner_text()) > 0
    assert f"{seconds:.1f} seconds" in page.locator("#wave").get_attribute("aria-label")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download WAV").click()
    download.value.save_as(tmp_path / "speech.wav")
    with wave.open(str(tmp_path / "speech.wav")) as file:
        assert file.getnframes() / file.getframerate() == pytest.approx(seconds)
    (ROOT / "out").mkdir(exist_ok=True)
    page.screenshot(path=ROOT / "out" / "speech_page.png", full_page=True)  # docs/ has a copy

    assert page.locator("#played").inner_text() == f"{seconds:.1f} s"
    replay = page.locator("#replay")
    assert replay.is_visible()
    moved = replay.evaluate("""async (audio) => {
      if (!audio.duration) await new Promise((loaded) => { audio.onloadedmetadata = loaded; });
      audio.currentTime = audio.duration / 2;
      await new Promise((sought) => { audio.onseeked = sought; });
      return [audio.duration, audio.currentTime / audio.duration];
    }""")
    assert moved == pytest.approx([seconds, 0.5], rel=0.01)


def test_what_will_be_spoken_is_shown_in_the_chosen_language_and_pronunciation(page: Any) -> None:
    offered = page.locator("#language option:enabled").evaluate_all("options => options.map((each) => each.value)")
    assert offered == ["", "zh", "en", "ja", "ko"]
    page.get_by_label("Text", exact=True).fill("nginx 25. [pause 1s]")
    page.get_by_text("What will be spoken").click()
    segments = page.locator("#segments li")
    segments.filter(has_text="nginx twenty five.").wait_for()
    assert re.fullmatch(r"nginx twenty five\. — \d\.\d s", segments.first.inner_text())
    assert segments.last.inner_text() == "(pause) — 1.0 s"
    page.get_by_label("Language").select_option("zh")
    segments.filter(has_text="二十五").wait_for()
    page.get_by_label("Language").select_option("en")
    page.get_by_text("Pronunciation", exact=True).click()
    words = page.get_by_label("Words")
    words.fill("nginx = engine x")
    words.blur()
    segments.filter(has_text="engine x twenty five.").wait_for()
    words.fill("nginx")
    words.blur()
    page.get_by_text("line 1: 'nginx' is not").wait_for()
    assert segments.count() == 0
    page.get_by_role("button", name="Speak", exact=True).click()
    page.locator("#state.wrong").filter(has_text="line 1: 'nginx' is not").wait_for()


@pytest.mark.parametrize("by", ["button", "keyboard"])
def test_stop_ends_playback_and_the_work(page: Any, speech_stack: SpeechStack, by: str) -> None:
    before = cancelled(speech_stack)
    text = page.get_by_label("Text", exact=True)
    text.fill(LONG)
    text.press("Control+Enter")
    state(page, "Speaking …")
    if by == "button":
        page.get_by_role("button", name="Stop", exact=True).click()
    else:
        page.keyboard.press("Escape")
    state(page, "Stopped.")
    until(lambda: cancelled(speech_stack) == before + 1)
    played = page.evaluate("window.played.length")
    page.wait_for_timeout(300)
    assert page.evaluate("window.played.length") == played
    assert page.get_by_role("button", name="Speak", exact=True).is_enabled()


def test_stop_also_ends_the_playback_of_audio_that_has_arrived(page: Any) -> None:
    """Playback is paused, so that it cannot end before."""
    page.evaluate("""() => {
      const Context = window.AudioContext;
      window.AudioContext = function () {
        const context = new Context();
        context.suspend();
        return context;
      };
    }""")
    page.get_by_label("Text", exact=True).fill(LONG[:200])
    page.get_by_role("button", name="Speak", exact=True).click()
    page.get_by_role("link", name="Download WAV").wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    state(page, "Stopped.")


def test_audio_that_cannot_be_played_ends_the_work(page: Any, speech_stack: SpeechStack) -> None:
    before = cancelled(speech_stack)
    page.evaluate("() => { AudioContext.prototype.createBuffer = () => { throw new Error('no memory'); }; }")
    page.get_by_label("Text", exact=True).fill(LONG)
    page.get_by_role("button", name="Speak", exact=True).click()
    page.get_by_text("no memory").wait_for()
    until(lambda: cancelled(speech_stack) == before + 1)


def test_a_voice_is_recorded_used_saved_and_deleted(page: Any) -> None:
    page.get_by_text("Your own voice").click()
    page.get_by_role("button", name="Record", exact=True).click()
    page.get_by_text(re.compile("Recording: [1-9]")).wait_for()
    page.get_by_role("button", name="Stop recording").click()
    page.get_by_text("selected as the voice").wait_for()
    page.get_by_role("button", name="Speak", exact=True).click()
    state(page, "Speaking …")
    page.get_by_label("Name").fill("of mine")
    page.get_by_role("button", name="Save as a voice").click()
    page.get_by_text("Saved as of mine.").wait_for()
    assert page.get_by_label("Voice", exact=True).input_value() == "of mine"
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete the selected voice").click()
    page.get_by_text("Deleted of mine.").wait_for()


def test_a_text_that_is_too_long_is_not_sent_and_its_length_is_shown(page: Any) -> None:
    text = page.get_by_label("Text", exact=True)
    text.fill("a" * 4097)
    page.get_by_text("4097 of 4096 characters").wait_for()
    page.get_by_role("button", name="Speak", exact=True).click()
    assert page.locator("#state").inner_text() == ""
    assert text.evaluate("text => text.validationMessage") == "The text has 1 characters too many."


def test_a_warning_of_the_model_is_shown(page: Any) -> None:
    page.get_by_label("Text", exact=True).fill("[happy:0.5] Hello.")
    page.get_by_label("Voice", exact=True).select_option(VOICE)
    page.get_by_role("button", name="Speak", exact=True).click()
    state(page, "tags were left out, as they mean nothing here: [happy:0.5]")


def test_a_voice_without_a_name_is_not_saved(page: Any) -> None:
    page.get_by_text("Your own voice").click()
    page.get_by_label("Audio file").set_input_files(RECORDING)
    page.get_by_text("selected as the voice").wait_for()
    page.get_by_role("button", name="Save as a voice").click()
    page.get_by_text("Give the voice a name first.").wait_for()
    assert page.evaluate("document.activeElement.id") == "name"


def test_the_page_recovers_when_the_service_was_away(page: Any) -> None:
    page.route("**/v1/**", lambda route: route.abort())
    page.get_by_role("button", name="Speak", exact=True).click()
    page.get_by_text("The service does not answer. Trying again …").wait_for()
    assert page.locator("#state").inner_text() == "The service does not answer."
    page.unroute("**/v1/**")
    page.get_by_text("cosyvoice2_dit", exact=True).wait_for()
    assert page.get_by_label("Voice", exact=True).input_value() == VOICE
    page.get_by_role("button", name="Speak", exact=True).click()
    state(page, "Speaking …")


def test_the_services_error_message_is_shown(page: Any) -> None:
    page.get_by_label("Text", exact=True).fill("?!")
    page.get_by_role("button", name="Speak", exact=True).click()
    page.get_by_text("has nothing to speak").wait_for()


def test_the_page_fits_a_phone_and_every_control_has_a_label(page: Any) -> None:
    tops = "['voice', 'speed'].map((id) => document.querySelector(`label[for=${id}]`).getBoundingClientRect().top)"
    voice, speed = page.evaluate(tops)
    assert voice == speed
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    page.get_by_text("Your own voice").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    controls = re.findall(r"- (button|textbox|combobox|slider|link)\b(.*)", page.locator("body").aria_snapshot())
    assert len(controls) > 8
    assert [name for name in controls if not name[1].startswith(' "')] == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background

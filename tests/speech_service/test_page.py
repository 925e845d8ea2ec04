"""The page in a real Chromium, with the real tritonserver."""

import re
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cosyvoice_triton.constants import SAMPLE_RATE

from tests.conftest import ROOT
from tests.support.speech_fixtures import RECORDING, VOICE, counted, until

playwright = pytest.importorskip("playwright.sync_api")
SCRIPTS = ROOT / "tests/assets/page"
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, speech_url: str) -> Iterator[Any]:
    """The page, opened; it must have no errors and send requests to the service only."""
    context = browser.new_context(viewport={"width": 1000, "height": 900}, accept_downloads=True, locale="en-GB")
    page = context.new_page()
    page.set_default_timeout(60 * SECOND)
    requested: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.add_init_script(path=SCRIPTS / "record_playback.js")
    page.goto(f"{speech_url}/")
    page.get_by_role("radio", name=VOICE, exact=True).wait_for()
    yield page
    context.close()
    assert [url for url in requested if not url.startswith((speech_url, f"blob:{speech_url}"))] == []
    ignored = "Failed to load resource"  # logged by the browser for status codes such as 400, which the page handles
    assert [error for error in errors if not error.startswith(ignored)] == []


def state(page: Any, text: str) -> None:
    """Wait until the page's status contains `text`; an error there ends the wait."""
    status = page.locator("#state")
    status.filter(has_text=text).or_(page.locator("#state.wrong")).wait_for()
    assert text in status.inner_text()


def speak(page: Any, text: str) -> None:
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Speak", exact=True).click()


def unfold(page: Any, title: str) -> None:
    page.locator("summary").get_by_text(title, exact=True).click()


def record(page: Any) -> None:
    """Record a second of beeps."""
    unfold(page, "Your own voice")
    page.get_by_role("button", name="Record", exact=True).click()
    page.locator("#recorded").filter(has_text=re.compile("^[1-9]")).wait_for()
    assert page.get_by_role("meter", name="Level").is_visible()
    page.get_by_role("button", name="Stop recording").click()
    page.get_by_text("selected as the voice").wait_for()


def cancelled(url: str) -> float:
    """How many requests ended because their client disconnected."""
    return counted(url, 'status="gone"', "_total{")


def frames(path: Path) -> int:
    """The samples of a WAV file whose header may have no length."""
    data = path.read_bytes()
    return (len(data) - data.index(b"data") - 8) // 2


def test_a_typed_text_is_spoken_marked_word_by_word_and_kept(page: Any, tmp_path: Path) -> None:
    assert page.get_by_text("Demo voice.").is_visible() and "demo voice" in page.locator("#service").inner_text()
    page.get_by_role("radio", name=VOICE, exact=True).check()
    page.get_by_label("Seed").fill("7")
    speak(page, "Hello. This is 1 text, and a machine speaks it.")
    state(page, "Done:")
    played = page.evaluate("window.played")
    seconds = sum(part["size"] for part in played) / SAMPLE_RATE
    assert seconds > 1
    assert all(part["rate"] == SAMPLE_RATE for part in played) and max(part["peak"] for part in played) > 0.01
    assert page.locator("#spoken").inner_text() == "Hello. This is one text, and a machine speaks it."
    assert page.evaluate("window.marked.size") > 1
    page.locator(".now").wait_for(state="detached")
    unfold(page, "Waveform and timing")
    assert re.fullmatch(r"\d+ ms", page.locator("#first").inner_text())
    assert float(page.locator("#factor").inner_text()) > 0
    assert f"{seconds:.1f} seconds" in page.locator("#wave").get_attribute("aria-label")
    assert page.locator("#played").inner_text() == f"{seconds:.1f} s"
    with page.expect_download() as download:
        page.get_by_role("link", name="Download WAV: Hello.").click()
    download.value.save_as(tmp_path / "speech.wav")
    with wave.open(str(tmp_path / "speech.wav")) as file:
        assert file.getnframes() / file.getframerate() == pytest.approx(seconds)
    unfold(page, "Waveform and timing")
    (ROOT / "out").mkdir(exist_ok=True)
    page.screenshot(path=ROOT / "out" / "speech_page.png", full_page=True)  # for `make pictures`
    replay = page.get_by_label("The last answer")
    moved = replay.evaluate((SCRIPTS / "sought_middle.js").read_text())
    assert moved == pytest.approx([seconds, 0.5], rel=0.01)
    page.locator(".now").wait_for()


def test_the_code_of_an_answer_gives_the_same_audio_and_has_no_key(page: Any, tmp_path: Path) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    unfold(page, "API key")
    page.get_by_label("Key").fill("secret")
    page.get_by_label("Key").blur()
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Speed").evaluate("input => { input.value = 1.25; input.dispatchEvent(new Event('input')); }")
    speak(page, 'It\'s said "so" — \\n.')
    page.get_by_role("link", name="Download WAV").wait_for()
    played = sum(part["size"] for part in page.evaluate("window.played"))
    unfold(page, "Code for this")
    programs = {}
    for language in ("curl", "Python", "JavaScript"):
        page.get_by_role("radio", name=language).check()
        page.get_by_role("button", name="Copy").click()
        page.get_by_text("Copied.").wait_for()
        programs[language] = page.evaluate("navigator.clipboard.readText()")
        assert "YOUR_API_KEY" in programs[language] and "secret" not in programs[language]
    subprocess.run(programs["curl"], shell=True, cwd=tmp_path, check=True, capture_output=True)
    assert frames(tmp_path / "speech.wav") == pytest.approx(played, abs=32)
    subprocess.run([sys.executable, "-c", programs["Python"]], cwd=tmp_path, check=True)
    assert frames(tmp_path / "speech.wav") == pytest.approx(played, abs=32)
    before = len(page.evaluate("window.played"))
    page.evaluate(f"async () => {{ {programs['JavaScript']} }}")
    again = page.evaluate("window.played")[before:]
    assert sum(part["size"] for part in again) == pytest.approx(played, abs=32)
    assert len(again) > 1 and {part["rate"] for part in again} == {SAMPLE_RATE}, "played while it arrives"


def test_the_last_answers_are_heard_and_used_again(page: Any) -> None:
    page.get_by_label("Format").select_option("mp3")
    page.get_by_role("button", name=f"Hear {VOICE}").click()
    page.get_by_role("link", name="Download MP3").wait_for()
    assert page.locator("#spoken").inner_text() == "Hello. This is how I sound."
    page.get_by_label("Format").select_option("wav")
    speak(page, "[happy:0.5] Another text.")
    state(page, "tags were left out, as they mean nothing here: [happy:0.5]")
    older = page.get_by_role("listitem").filter(has_text="This is how I sound.")
    page.evaluate("window.marked.clear()")
    older.get_by_role("button", name="Play").click()
    state(page, "Speaking again:")
    until(lambda: page.evaluate("window.marked.size > 0"))  # `wait_for_function` needs what the page's policy forbids
    older.get_by_role("button", name="Use again").click()
    assert page.get_by_label("Text", exact=True).input_value() == "Hello. This is how I sound."
    assert page.get_by_label("Format").input_value() == "mp3"
    with page.expect_download() as download:
        older.get_by_role("link", name="Download MP3").click()
    assert re.fullmatch(r"speech-\d+\.mp3", download.value.suggested_filename)


def test_many_voices_can_be_searched(page: Any) -> None:
    assert not page.get_by_label("Find a voice").is_visible()
    listed = [{"id": f"voice {number}"} for number in range(20)]
    page.route("**/v1/audio/voices", lambda route: route.fulfill(json={"voices": listed}))
    page.reload()
    page.get_by_label("Find a voice").fill("E 17")
    voices = page.get_by_role("radiogroup", name="Voice").get_by_role("radio")
    voices.nth(1).wait_for(state="detached")
    assert voices.first.input_value() == "voice 17"


def test_examples_and_marks_are_put_into_the_text_and_can_be_undone(page: Any) -> None:
    text = page.get_by_label("Text", exact=True)
    before = text.input_value()
    page.get_by_role("button", name="Greeting").click()
    assert text.input_value().startswith("Hello, and welcome.")
    page.keyboard.press("Control+z")
    assert text.input_value() == before
    page.get_by_label("Language").select_option("ja")
    page.get_by_role("button", name="あいさつ").click()
    assert text.input_value().startswith("こんにちは。")
    text.fill("B7")
    text.select_text()
    unfold(page, "Pauses, SSML and several voices")
    page.get_by_role("button", name="letter by letter").click()
    marked = '<speak><say-as interpret-as="characters">B7</say-as></speak>'
    assert text.input_value() == marked
    page.get_by_role("button", name="Pause of 1 s").click()
    assert text.input_value() == marked.replace("B7", "B7[pause 1s]")


def test_what_will_be_spoken_is_shown_in_the_chosen_language_and_pronunciation(page: Any) -> None:
    offered = page.locator("#language option").evaluate_all("options => options.map((each) => each.value)")
    assert offered == ["", "zh", "en", "ja", "ko"]
    unfold(page, "What will be spoken")
    page.get_by_label("Text", exact=True).fill("nginx 25. [pause 1s]")
    segments = page.locator("#segments li")
    segments.filter(has_text="nginx twenty five.").wait_for()
    assert re.fullmatch(r"nginx twenty five\. — \d\.\d s", segments.first.inner_text())
    assert segments.last.inner_text() == "(pause) — 1.0 s"
    page.get_by_label("Language").select_option("zh")
    segments.filter(has_text="二十五").wait_for()
    page.get_by_label("Language").select_option("en")
    unfold(page, "Pronunciation")
    words = page.get_by_label("Words and what")
    words.fill("nginx = engine x")
    words.blur()
    segments.filter(has_text="engine x twenty five.").wait_for()
    words.fill("nginx")
    words.blur()
    page.locator("#preview-state").filter(has_text="Pronunciation: line 1: 'nginx' is not").wait_for()
    assert segments.count() == 0
    page.get_by_role("button", name="Speak", exact=True).click()
    page.locator("#state.wrong").filter(has_text="line 1: 'nginx' is not").wait_for()


@pytest.mark.parametrize("by", ["button", "keyboard"])
def test_stop_ends_playback_and_the_work(page: Any, speech_url: str, by: str) -> None:
    before = cancelled(speech_url)
    text = page.get_by_label("Text", exact=True)
    text.fill(LONG)
    text.press("Control+Enter")
    state(page, "Speaking …")
    if by == "button":
        page.get_by_role("button", name="Stop", exact=True).click()
    else:
        page.keyboard.press("Escape")
    state(page, "Stopped.")
    until(lambda: cancelled(speech_url) == before + 1)
    played = page.evaluate("window.played.length")
    page.wait_for_timeout(300)
    assert page.evaluate("window.played.length") == played
    assert page.get_by_role("button", name="Stop", exact=True).is_disabled()


def test_stop_also_ends_the_playback_of_audio_that_has_arrived(page: Any) -> None:
    """Playback is paused, so that it cannot end before."""
    page.evaluate((SCRIPTS / "suspend_playback.js").read_text())
    speak(page, LONG[:200])
    page.get_by_role("link", name="Download WAV").wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    state(page, "Stopped.")


def test_audio_that_cannot_be_played_ends_the_work(page: Any, speech_url: str) -> None:
    before = cancelled(speech_url)
    page.evaluate("() => { AudioContext.prototype.createBuffer = () => { throw new Error('no memory'); }; }")
    speak(page, LONG)
    page.get_by_text("no memory").wait_for()
    until(lambda: cancelled(speech_url) == before + 1)


def test_a_voice_is_recorded_trimmed_judged_saved_with_its_words_and_consent_exported_imported_and_deleted(
    page: Any, tmp_path: Path
) -> None:
    record(page)
    judgement = page.get_by_label("Judgement of the recording")
    judgement.get_by_text("It is short").wait_for()
    page.get_by_label("Transcript").fill("Far too many words for so little time, " * 8)
    page.get_by_label("Transcript").blur()
    judgement.get_by_text("but its transcript takes about").wait_for()
    end = page.get_by_label("Ends at")
    whole = float(end.input_value())
    end.focus()
    end.press("ArrowLeft")
    page.get_by_text(f"{whole - 0.05:.2f} s").wait_for()
    page.get_by_label("Transcript").fill("Beep.")
    page.get_by_role("button", name="Speak", exact=True).click()
    state(page, "Speaking …")
    page.get_by_label("Name").fill("of mine")
    page.get_by_label("Words of this voice").fill("xyzzy = magic")
    page.get_by_label("Consent").fill("Given by the machine.")
    page.get_by_role("button", name="Save as a voice").click()
    page.get_by_text("Saved as of mine.").wait_for()
    assert page.get_by_role("radio", name="of mine", exact=True).is_checked()
    page.get_by_label("Text", exact=True).fill("Say xyzzy.")
    unfold(page, "What will be spoken")
    page.locator("#segments").get_by_text("Say magic.").wait_for()
    unfold(page, "Export, delete, import")
    rights = page.locator("#rights")
    assert "of mine" in rights.inner_text() and "none that this key may see" in rights.inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export the selected voice").click()
    assert download.value.suggested_filename == "of mine.zip"
    download.value.save_as(tmp_path / "of mine.zip")
    page.get_by_label("Import a voice").set_input_files(RECORDING)
    page.get_by_text("the file is not a zip of an exported voice").wait_for()
    page.on("dialog", lambda dialog: dialog.accept("a copy" if dialog.type == "prompt" else None))
    page.get_by_label("Import a voice").set_input_files(tmp_path / "of mine.zip")
    page.get_by_text("Imported a copy.").wait_for()
    assert page.get_by_role("radio", name="a copy", exact=True).is_checked()
    assert "a copy" in rights.inner_text()
    for name in ("a copy", "of mine"):
        page.get_by_role("radio", name=name, exact=True).check()
        page.get_by_role("button", name="Delete the selected voice").click()
        page.get_by_text(f"Deleted {name}.").wait_for()
    page.get_by_role("radio", name="Your recording").check()
    assert page.get_by_role("button", name="Export the selected voice").is_disabled()


def test_a_recording_is_spoken_in_the_selected_voice(page: Any) -> None:
    page.get_by_role("radio", name=VOICE, exact=True).check()
    unfold(page, "Speech instead of a text")
    page.get_by_label("Choose a recording").set_input_files(RECORDING)
    state(page, "Done: 5.4 seconds.")
    seconds = sum(part["size"] for part in page.evaluate("window.played")) / SAMPLE_RATE
    assert seconds == pytest.approx(5.4, abs=0.1) and page.get_by_label("The last answer").is_visible()


def test_a_voice_without_a_name_is_not_saved(page: Any) -> None:
    unfold(page, "Your own voice")
    page.get_by_label("Choose an audio file").set_input_files(RECORDING)
    page.get_by_text("selected as the voice").wait_for()
    page.get_by_label("Judgement of the recording").get_by_text("Nothing to mend.").wait_for()
    page.get_by_role("button", name="Save as a voice").click()
    page.get_by_text("Give the voice a name first.").wait_for()
    assert page.evaluate("document.activeElement.id") == "name"


def test_a_text_that_is_too_long_is_not_sent_and_its_length_is_shown(page: Any) -> None:
    speak(page, "a" * 4097)
    page.get_by_text("4097 of 4096 characters").wait_for()
    assert page.locator("#state").inner_text() == "Nothing has been spoken yet."
    message = page.get_by_label("Text", exact=True).evaluate("text => text.validationMessage")
    assert message == "The text has 1 characters too many."


def test_the_page_recovers_when_the_service_was_away(page: Any) -> None:
    page.route("**/v1/**", lambda route: route.abort())
    page.get_by_role("button", name="Speak", exact=True).click()
    page.get_by_text("The service does not answer. Trying again …").wait_for()
    assert page.locator("#state").inner_text() == "The service does not answer."
    page.unroute("**/v1/**")
    page.get_by_text("cosyvoice2_dit · demo voice", exact=True).wait_for()
    assert page.get_by_role("radio", name=VOICE, exact=True).is_checked()
    page.get_by_role("button", name="Speak", exact=True).click()
    state(page, "Speaking …")


def test_a_page_whose_server_died_says_so_until_it_is_back(page: Any) -> None:
    for path in ("**/health", "**/v1/**"):
        page.route(path, lambda route: route.abort())
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # as if the tab were looked at again
    page.locator("#service").filter(has_text="The service does not answer. Trying again …").wait_for()
    page.unroute("**/v1/**")
    page.locator("#service").get_by_text("cosyvoice2_dit · demo voice", exact=True).wait_for()


def test_errors_say_in_a_visitors_words_what_to_do(page: Any) -> None:
    speak(page, "?!")
    page.get_by_text("only signs. Write at least one word.").wait_for()
    answers: list[dict[str, Any]] = []
    page.route("**/v1/audio/speech", lambda route: route.fulfill(**answers[0]))
    for status, words in {
        401: "asks for a key. Enter yours under “API key”",
        429: "The server has no place for another listener right now. Try again in 3 seconds.",
        503: "The model is not ready: it is starting, or being replaced. Try again in 3 seconds. (no Triton",
    }.items():
        error = {"message": "no Triton answers", "param": None, "code": None}
        answers[:] = [
            {"status": status, "json": {"error": error}, "headers": {"retry-after": "3"} if status > 401 else {}}
        ]
        page.get_by_role("button", name="Speak", exact=True).click()
        page.locator("#state.wrong").filter(has_text=words).wait_for()
    assert page.get_by_label("Key").is_visible()


def test_every_control_has_a_name_is_reached_by_keyboard_and_shows_its_focus(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    controls = re.findall(r"- (button|textbox|combobox|slider|link|radio)\b(.*)", page.locator("body").aria_snapshot())
    assert len(controls) > 20
    assert [name for name in controls if not name[1].startswith(' "')] == []
    wanted = page.evaluate(f"({(SCRIPTS / 'controls.js').read_text()})().map((each) => each.id || each.outerHTML)")
    reached = set()
    for _ in range(2 * len(wanted)):
        page.keyboard.press("Tab")
        name, outline = page.evaluate("""() => {
          const { activeElement: active } = document;
          const shown = active.matches(".hidden") ? active.labels[0] : active;
          return [active.id || active.outerHTML, getComputedStyle(shown).outlineStyle];
        }""")
        reached.add(name)
        assert outline != "none" or name.startswith("<body")
    assert set(wanted) - reached == set()


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_it_fits_a_phone_and_is_readable_by_day_and_night(page: Any, speech_url: str, path: str) -> None:
    page.goto(speech_url + path)
    page.locator("summary").first.wait_for()
    page.set_viewport_size({"width": 320, "height": 640})
    if path == "/":
        page.get_by_role("button", name="Speak", exact=True).scroll_into_view_if_needed()
        assert page.locator("#state").evaluate("each => each.getBoundingClientRect().bottom < innerHeight")
    grounds = set()
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate((SCRIPTS / "poor_contrasts.js").read_text()) == []
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert len(grounds) == 2


def test_the_documentation_is_read_searched_and_linked(page: Any) -> None:
    page.get_by_role("link", name="API documentation").click()
    page.get_by_label("Find").fill("batch")
    page.get_by_text("1 route", exact=True).wait_for()
    page.locator("summary").filter(has_text="/v1/audio/speech/batch").click()
    page.get_by_text("items", exact=True).first.wait_for()
    page.get_by_label("Find").fill("")
    page.locator("summary").filter(has_text=re.compile("^POST /v1/audio/speech Speak")).click()
    page.get_by_text("0.25 to 4; the pitch is kept").first.wait_for()


def test_what_a_visitor_says_is_spoken_in_the_voice_meanwhile(page: Any) -> None:
    page.get_by_role("radio", name=VOICE, exact=True).check()
    unfold(page, "Speech instead of a text")
    page.get_by_role("button", name="Speak live").click()
    state(page, "Speaking")
    assert page.get_by_role("button", name="Stop speaking").is_visible()  # audio came before the speech has ended
    page.get_by_role("button", name="Stop speaking").click()
    state(page, "Done:")
    assert sum(part["size"] for part in page.evaluate("window.played")) > SAMPLE_RATE / 2
    page.get_by_role("button", name="Speak live").wait_for()

"""Speech over HTTP in front of Triton: the routes of OpenAI's API, voices, a WebSocket and a web page to try it on.

    cosyvoice-triton serve --speech-port 10086           Triton and this service together
    cosyvoice-triton speech --url localhost:8001         next to a Triton that is running already
    cosyvoice-triton speech --url gpu1:8001 gpu2:8001 --host 0.0.0.0 --api_keys "$KEY"

    curl http://localhost:10086/v1/audio/speech -o hello.mp3 \\
        -H 'Content-Type: application/json' -d '{"model": "tts-1", "input": "Hello.", "voice": "anna"}'

Every option can be set in the environment as well: --max_streams as SPEECH_MAX_STREAMS, lists separated by commas. The
service accepts connections from this machine only, unless --host is given. docs/http.md lists the routes and fields.
"""

from collections.abc import Sequence

from cosyvoice_triton.speech_service import command


def main(argv: Sequence[str] | None = None) -> int:
    return command.main(argv, str(__doc__))

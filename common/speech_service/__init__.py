"""Speech over HTTP in front of one or several Tritons: what people reach with an SDK, curl or a browser.

command.py      options and environment, the HTTP server; `python -m common.speech_service` starts it
settings.py     what can be set, checked once
errors.py       what goes wrong, as OpenAI words it
triton.py       the Tritons: who serves what, who has least to do, one connection each
core.py         one request's audio, as it is made: admission, another Triton if one fails, cancellation, figures
encoding.py     float audio to bytes of a format, chunk by chunk; other rates and speeds
recordings.py   uploaded recordings, judged before they travel
shelf.py        the voices by name: listed, added, taken away
requests.py     what a client may ask for
responses.py    answers that are sent while they are made, plain or as events
guard.py        before every route: keys, foreign pages, sizes; after it: figures
speech_routes.py voice_routes.py socket_route.py    OpenAI's routes and their usual extensions
runtime_http.py runtime_grpc.py                     the plain runtime's routes and its gRPC service
app.py          all of it as one application
static/         the page
"""

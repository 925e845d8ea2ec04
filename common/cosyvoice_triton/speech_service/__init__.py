"""Speech over HTTP in front of one or several Tritons, for SDKs, curl and browsers.

command.py      options and environment, the HTTP server; `python -m cosyvoice_triton.speech_service` starts it
sidecar.py      the service as a child process of the process that runs a tritonserver
settings.py     the settings, validated once
errors.py       errors in OpenAI's format
triton.py       the Tritons: one connection each, health probes, the least busy one for each request
dispatcher.py   a request's audio as it is generated: admission, failover, cancellation, metrics
encoding.py     float audio to bytes of a format, chunk by chunk; sample rates and speeds
recordings.py   uploaded recordings, decoded and validated
voices.py       registered voices: list, add, delete
requests.py     request bodies and their validation
responses.py    streamed answers, as plain audio or as server-sent events
protocol.py     limits of connections: size of headers, time to send a request
guard.py        before every route: API keys, origins, sizes; after it: metrics
service.py      what the routes share
speech_routes.py voice_routes.py socket_route.py    OpenAI's routes and common extensions of them
runtime_http.py runtime_grpc.py                     the plain runtime's routes and its gRPC service
app.py          the application that joins all of it
static/         the web page
"""

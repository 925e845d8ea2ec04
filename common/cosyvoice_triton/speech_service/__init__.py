"""Speech over HTTP in front of one or several Tritons, for SDKs, curl and browsers.

command.py      options and environment, the HTTP server; `cosyvoice-triton speech` starts it
sidecar.py      the service as a child process of the process that runs a tritonserver
app.py          the application that joins all of it
routes/         OpenAI's routes and common extensions of them, the WebSocket, the plain runtime over HTTP and gRPC
security/       before every route: connection limits, API keys, origins, sizes; after it: metrics
service.py      what the routes share
dispatcher.py   an answer's audio as it is generated: admission, failover, cancellation, metrics
answer.py       what one answer consists of, and what has been generated of it
outcomes.py     what became of the answers, for a caller who asks later
triton.py       the Tritons: one connection each, health probes, the least busy one for each request
bodies.py       request bodies and their validation
limits.py       the limits of every field and route, which the OpenAPI document shows
voices.py       registered voices: list, add, delete
audio/          encoding to formats and rates, decoding of uploads in other processes, timestamps and subtitles
errors.py       errors in OpenAI's format, with the names of a body's fields
settings.py     the settings, each defined once
page/           the web page, served at /static
"""

"""A soak: a served stack under mixed load and faults for minutes or hours, and every request accounted for. A use of
load/, whose runner sends the requests.

cases.py    the requests, by seed: route, voice, text; some are cancelled, some are bad and have an expected answer
routes.py   a door for every interface
outcomes.py how each request ended, and which fault explains an error
stack.py    the servers: started, restarted when they end, as a supervisor does
faults.py   processes killed and stopped, faults inside the models
sampling.py memory, threads, files and shared memory of every process, and whether they grow
runner.py   all of these at the same time
"""

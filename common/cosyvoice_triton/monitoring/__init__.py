"""What every process of a server shares, whichever model it runs.

environment.py   the environment variables by which the process that starts tritonserver configures the models'
metrics.py       what they count, how they publish it without a free byte on the disk, and the page over all of them
health.py        whether they still do their work, and take new requests; what a worker that has freed memory gives back
logs.py          the format of their log
faults.py        faults that tests produce in them

Not in `server/`, which starts and supervises tritonserver: the models import this room, and `server/` is above them.
"""

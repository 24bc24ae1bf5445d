"""Files of others, damaged on purpose: every importer opens them or refuses them, and does nothing else.

    python -m tests.fuzz --minutes 30 --jobs 2        the long form (make test-fuzz)
    python -m tests.fuzz --case dataset:1234          one case again, with its traceback

A kind (`kinds/`) is a small valid sample, the doors through which users open such files, and which of their content a digest covers.
A case is a kind and a number: the mutations (`mutate/`), the door, everything follows from the two. Its outcome must be the content
of the sample, other content where no digest covers what was changed, or one `PetatronError`; within bounds of time and memory, and
with nothing written, removed or started outside the working folder (`guard.py`). Cases run in processes of their own (`worker.py`),
which may crash or hang. What has failed once is kept in `corpus/`, and the default suite opens it again.
"""

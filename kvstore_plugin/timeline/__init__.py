"""``python -m kvstore_plugin.timeline FILE ...``: a page that shows timelines, and one trace of all ranks.

It reads the files that `start_timeline` has written, and imports neither MPI nor the core.
"""

"""The HTTP service: `fairseq-el serve`.

Two processes. The front (`server`, `app`, `guard`, `scheduler`) speaks HTTP, keeps the queue and forms batches. It
imports neither torch nor fairseq, so that it answers at once whatever the model does. The worker (`worker`, `engine`)
has the model. They exchange the `messages` over a socket pair.
"""

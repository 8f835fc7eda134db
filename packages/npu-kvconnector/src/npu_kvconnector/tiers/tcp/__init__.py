"""The p2p tier over TCP: blocks of a prompt, from the memory of the server that computed it to the one that goes on.

``config.py`` says what users may write, ``params.py`` what requests carry, ``messages.py`` what peers say to each
other. ``outbox.py`` holds blocks on the prefill server and ``server.py`` hands them out; ``client.py`` asks for them on
the decode server. ``probe.py`` answers peers that ask for whatever is here. ``exchange.py`` does all that in a
background thread, and ``manager.py`` is vLLM's interface over it.
"""

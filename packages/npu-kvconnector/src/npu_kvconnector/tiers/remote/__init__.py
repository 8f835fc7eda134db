"""The remote tier: blocks in an object store or in Valkey, shared by the servers that hold the same secret.

``config.py`` reads the options, ``manager.py`` is what vLLM talks to. A store (``store.py``) finds, loads and saves
sealed records: ``objects.py`` packs several into an object (``pack.py``), ``valkey_store.py`` keeps one a key.
``codec.py`` makes payloads smaller, ``hedging.py`` sends slow reads a second time, and ``background.py`` is the thread
that all of this runs in.
"""

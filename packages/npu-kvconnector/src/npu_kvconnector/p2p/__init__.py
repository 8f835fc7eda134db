"""Disaggregated prefill: one server computes prompts, another goes on from their KV blocks, read through NIXL.

``connector.py`` is vLLM's pull connector with the two halves of ours: ``scheduler.py`` issues and checks tickets
(``tickets.py``) and answers on an encrypted channel (``channel.py``), ``worker.py`` asks on it and keeps deadlines.
``config.py`` reads the options, ``proxy.py`` is a small proxy in front of the servers.
"""

"""The durable tier: KV blocks on a local disk, which survive restarts and power cuts and are never wrong.

A *store* is a folder: append-only segment files that hold the blocks, each in an envelope, and an LMDB index that says
where each block lies. From below: `files` (pages, O_DIRECT), `envelope` (one block on disk), `segments` (one file),
`threads` (which may hang with a disk), `index` and `probe` (the index, and the proof that it can be read), `eviction`
(which segment goes), `recovery` (what a start does), `store` (writer and readers), `cipher` (encryption), `manager`
(vLLM's interface). None but the last needs vLLM or torch.

Note [What is durable]. Blocks are appended, then made durable together (fdatasync), and only then named by the index,
in one transaction that is durable as well; this begins half of `sync_seconds` after a block was handed to the tier. So
the index never names bytes that a power cut can take back, and no more than the last `sync_seconds` are lost where disk
and host keep up. No place is written twice: a segment is filled once and removed as a whole.
"""

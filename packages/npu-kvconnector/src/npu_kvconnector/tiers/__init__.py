"""Where KV blocks go when the device lets go of them; one module a medium."""

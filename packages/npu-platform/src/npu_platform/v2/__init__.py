"""vLLM's V2 model runner on npu: its seams, streams, graphs and drafts; its Triton kernels run as they are."""

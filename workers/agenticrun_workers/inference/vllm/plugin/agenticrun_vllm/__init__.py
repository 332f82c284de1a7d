"""What AgenticRun adds to a vLLM server: runs inside vLLM's processes and environment, so it imports nothing else of ours.

The server finds it on PYTHONPATH and is told of it by its own options: `--worker-extension-cls agenticrun_vllm.worker.Worker` and
`--logits-processors agenticrun_vllm.sampler:RequestArguments`.
"""

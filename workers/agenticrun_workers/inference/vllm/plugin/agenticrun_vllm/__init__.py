"""AgenticRun's plug-in for vLLM servers.

It runs inside vLLM's processes and environment, so it imports nothing else of ours. The server
finds it on PYTHONPATH and loads it because of two of its own options:
`--worker-extension-cls agenticrun_vllm.worker.Worker` and
`--logits-processors agenticrun_vllm.sampler:RequestArguments`.
"""

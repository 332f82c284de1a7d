"""The engine SGLang: a server in an environment of its own, and the plug-in that runs inside it."""

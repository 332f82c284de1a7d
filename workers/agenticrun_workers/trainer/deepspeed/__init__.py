"""The strategy `deepspeed`: ZeRO 1 to 3."""

"""The run itself: the loop, and what it is made of."""

"""One OpenAI-compatible server, for users (`posttrain serve`) and for the agents of RL."""

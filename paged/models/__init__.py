"""Language models: one decoder for Llama, Qwen2, Qwen2.5 and Qwen3, and what reads its weights and its text."""

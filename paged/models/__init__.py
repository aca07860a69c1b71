"""Language models: one decoder for Llama, Qwen2, Qwen2.5 and Qwen3, its weights and its
tokenizer."""

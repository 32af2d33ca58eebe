"""A checkpoint as a GGUF file for llama.cpp: ciuic's statistics and budget choose a type for each tensor."""

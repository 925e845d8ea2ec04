"""What the offline tools share: data (`inputs`), the LLM's backends (`llm`, `transformers_lm`), the vocoder
(`vocoder`), the stages (`pipeline`), their times (`stages`) and the folder that the audio goes to (`results`).
"""

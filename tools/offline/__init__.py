"""What the offline tools share: samples and voices (`inputs`), the LLM's backends (`llm`, `transformers_lm`), the
vocoder (`vocoder`), the stages one after another (`pipeline`) and their times (`stages`), the folder that the audio
goes to (`results`), streamed against whole (`compare`), and how a tool ends (`tool`).
"""

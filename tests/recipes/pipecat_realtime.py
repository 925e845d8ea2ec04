"""A text spoken by pipecat's realtime service, which test_recipes.py runs."""

import asyncio
import wave

from pipecat.frames.frames import EndFrame, Frame, LLMContextFrame, LLMFullResponseEndFrame, TTSAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.events import AudioConfiguration, AudioOutput, SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService


class Recorder(FrameProcessor):
    def __init__(self, file: wave.Wave_write, task: list[PipelineTask]) -> None:
        super().__init__()
        self._file, self._task = file, task

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self._file.writeframes(frame.audio)
        if isinstance(frame, LLMFullResponseEndFrame):
            await self._task[0].queue_frame(EndFrame())
        await self.push_frame(frame, direction)


async def main() -> None:
    session = SessionProperties(audio=AudioConfiguration(output=AudioOutput(voice="nezumi")))
    speech = OpenAIRealtimeLLMService(
        base_url="ws://localhost:10086/v1/realtime",
        api_key="none",
        settings=OpenAIRealtimeLLMService.Settings(session_properties=session),
    )
    with wave.open("hello.wav", "wb") as file:
        file.setparams((1, 2, 24000, 0, "NONE", ""))
        tasks: list[PipelineTask] = []
        tasks.append(PipelineTask(Pipeline([speech, Recorder(file, tasks)])))
        context = LLMContext([{"role": "user", "content": "Hello. This is said by a pipeline of pipecat."}])
        await tasks[0].queue_frame(LLMContextFrame(context))
        await PipelineRunner(handle_sigint=False).run(tasks[0])


asyncio.run(main())

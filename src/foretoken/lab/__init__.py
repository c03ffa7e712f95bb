"""The lab: plan, measure and decide whether to speculate, for any OpenAI-style server.

Speaks HTTP and reads files; imports neither torch nor the engine. Measuring is in `statistics*`,
`client`, `bench`, `ab` and their neighbours; what a run leaves behind is in `results`.
"""

from hypothesis import settings

# A machine that is busy with other work is no failure.
settings.register_profile("without-deadline", deadline=None)
settings.load_profile("without-deadline")

from hypothesis import settings

# A slow machine must not fail a property test.
settings.register_profile("without-deadline", deadline=None)
settings.load_profile("without-deadline")

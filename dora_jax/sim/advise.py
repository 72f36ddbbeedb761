def report(settings, progress): return ""

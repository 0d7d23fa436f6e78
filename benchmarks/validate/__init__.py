"""Does the cost model predict what an emulated network then takes?"""

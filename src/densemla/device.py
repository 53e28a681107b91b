"""Does this torch build hold code for this GPU?"""

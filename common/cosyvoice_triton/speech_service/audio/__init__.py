"""Audio in and out of the speech service: uploads, formats, times of words."""

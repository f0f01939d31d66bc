"""The commands `nkisim run|time|report|trace`; lint and coverage have their own modules."""

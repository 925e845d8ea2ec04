"""Routes of the speech service and the bodies that they take and return."""
